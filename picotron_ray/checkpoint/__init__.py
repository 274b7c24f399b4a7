"""Snapshots in host memory, and checkpoints in storage that nothing committed is ever lost from.

Bottom up: ``canonical``, ``boxes`` (what is spoken of) · ``slot_format``, ``slots``, ``slot_view``, ``pool``,
``share`` (snapshots) · ``storage``, ``local``, ``s3`` (where objects are kept) · ``chunks``, ``manifest``,
``upload`` (what they are) · ``log``, ``lineage``, ``commit`` (what counts) · ``verify``, ``gc`` (what is
good, what may go) · ``sources``, ``commit_source``, ``dcp`` (restoring; ``dcp`` alone imports torch).
"""
