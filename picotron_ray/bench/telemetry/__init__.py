"""``picotron-ray bench telemetry``: the cost of timing steps."""
