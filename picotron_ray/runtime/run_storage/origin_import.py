"""The first commit of a run that begins with another one's state."""

from __future__ import annotations

from picotron_ray.checkpoint.storage.base import Storage, get_json
from picotron_ray.checkpoint.store.import_commit import copy_commit
from picotron_ray.checkpoint.store.manifest import load_manifest
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.messages import GenerationId, GenerationSpec, Source
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.run_storage.generation_entries import generation_body
from picotron_ray.runtime.run_storage.hf_assets import copy_assets
from picotron_ray.runtime.run_storage.init_from import open_origin


def import_origin(job: JobConfig, storage: Storage, log: RunLog) -> list[str]:
    """Make the commit that ``init_from`` names this run's first one, once; returns what was done.

    Its writer is a generation of no members, number 0 of the term, so that the machine finds a commit
    of step 0, and needs to know nothing else. After a crash in between it is done again.
    """
    if job.init_from.run is None:
        return []
    entries = log.entries()
    if any(e.kind == "commit" or (e.kind == "generation" and e.body["n"] > 0) for e in entries):
        return []
    source = open_origin(job)
    origin = get_json(storage, "run.json")["origin"]
    identity = GenerationId(log.term, 0)
    layout = load_manifest(source, origin["manifest"], origin["digest"]).layout
    reason = f"initial state: step {origin['step']} of {origin['from']}"
    spec = GenerationSpec(identity, (), Layout.from_dict(layout), Source("init"), reason)
    moments = job.init_from.optimizer_state
    pair = (identity.term, identity.n)
    copy_assets(source, storage)
    key, digest = copy_commit(source, origin["manifest"], origin["digest"], storage, pair, moments)
    log.append("generation", generation_body(spec))
    body = {"term": identity.term, "n": identity.n, "step": 0, "manifest": key, "digest": digest}
    log.append("commit", body)
    return [reason + (", with its optimizer state" if moments else ", weights alone")]
