"""Names of files of a worker's tools, known without torch."""

SUFFIX = ".recording.json.gz"
