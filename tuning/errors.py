"""Ends of a sweep without a result; the other errors are picotron_ray's own."""

from __future__ import annotations

from picotron_ray.errors import PicotronError, StorageError


class InterruptedSweepError(PicotronError):
    """The sweep was told to stop; the same command resumes it."""

    exit_code = 130


class NoneFinishedError(PicotronError):
    """No trial of a stage finished, so there is no best one."""


class TrialFailedError(PicotronError):
    """A trial's run ended without finishing; the message is the run's own reason."""


class StudyStorageError(StorageError):
    """A trial ended because the study's storage is full or gone, which says nothing about its point."""
