"""Assembler of manifests as a process of its own, for `assembly_process`.

    python -m picotron_ray.runtime.run_storage.assembly_server

Questions come on its input as frames (`assembly_frames`): first ``{"job": {...}}``, then ``assemble`` with
the parts, ``store`` of what was assembled last, or ``outline`` of a manifest. Each is answered by one frame;
in between it says each second that it is at work. It ends when its input does or its parent has died, so it
does not outlive whoever asks. It imports neither Ray nor torch.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import IO, Any

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.assembly import Assembler
from picotron_ray.checkpoint.store.manifest import Segment
from picotron_ray.checkpoint.store.outline import Outline, decode_outline
from picotron_ray.checkpoint.store.upload_part import decode_part
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import PicotronError
from picotron_ray.runtime.run_storage.assembly_frames import (
    decode_frames,
    encode_frame,
    error_words,
    outline_words,
    stored_words,
)

BEAT_S = 1.0
Words = tuple[dict[str, Any], Sequence[bytes]]


class Answers:
    """Answers to questions; what was assembled last is kept until it is stored."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._at: Assembler | None = None

    def answer(self, question: dict[str, Any], blobs: Sequence[bytes]) -> Words:
        """Answer in words; an error is one too."""
        work = {"assemble": self._assemble, "store": self._store, "outline": self._outline}
        try:
            return work[question.pop("do")](blobs, **question)  # type: ignore[operator]
        except Exception as error:  # noqa: BLE001 - whatever it is, whoever asks raises it
            if not isinstance(error, PicotronError):
                traceback.print_exc()
            return error_words(error), ()

    def _assemble(
        self, blobs: Sequence[bytes], parent: dict[str, Any] | None, grace_s: float, unproven: bool
    ) -> Words:
        known = None
        if parent is not None:
            known = Outline(parent["step"], 0, 0, tuple(Segment(*row) for row in parent["ledger"]))
        self._at = None  # before the next one takes memory
        self._at = Assembler(self._storage, [decode_part(blob) for blob in blobs], grace_s, unproven)
        return outline_words(self._at.assemble(known))

    def _store(self, blobs: Sequence[bytes]) -> Words:
        assert self._at is not None, "nothing is assembled"
        return stored_words(self._at.store()), ()

    def _outline(self, blobs: Sequence[bytes], key: str) -> Words:
        return outline_words(decode_outline(key, blobs[0]))


class Voice:
    """Writer of whole frames, for two threads."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out, self._lock = out, threading.Lock()

    def say(self, words: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        with self._lock:
            self._out.writelines(encode_frame(words, blobs))
            self._out.flush()

    def beat(self, parent: int) -> None:
        """Say each second that this process lives, until nobody listens: then it ends."""
        while os.getppid() == parent:
            try:
                self.say({"beat": True})
            except OSError:
                break
            time.sleep(BEAT_S)
        os._exit(1)


def serve(source: IO[bytes], voice: Voice) -> None:
    """Answer the questions in ``source`` until it ends."""
    unread, answers = bytearray(), None
    while found := source.read1(1 << 20):  # type: ignore[attr-defined]
        unread += found
        for question, blobs in decode_frames(unread):
            if answers is None:
                job = JobConfig.model_validate(question["job"])
                answers = Answers(open_storage(job.storage, job.name))
            else:
                voice.say(*answers.answer(question, blobs))
                gc.collect()


def main() -> None:
    gc.disable()  # it would look through millions of living objects over and over
    voice = Voice(sys.stdout.buffer)
    threading.Thread(target=voice.beat, args=(os.getppid(),), daemon=True).start()
    serve(sys.stdin.buffer, voice)


if __name__ == "__main__":
    main()
