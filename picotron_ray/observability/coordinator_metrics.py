"""Metrics that the coordinator serves: training, elasticity and checkpoints."""

from __future__ import annotations

from picotron_ray.observability.metric import Metric

RECOVERY_BUCKETS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
COMMIT_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)
PLAN_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0)

TRAINING = (
    Metric(
        "picotron_training_steps",
        "gauge",
        "steps",
        "Newest finished optimizer step; falls where a recovery goes back.",
        "coordinator",
        in_ray=True,
    ),
    Metric(
        "picotron_training_target_steps",
        "gauge",
        "steps",
        "Steps at which the run ends (steps of the config).",
        "coordinator",
        in_ray=True,
    ),
    Metric(
        "picotron_training_loss_nats",
        "gauge",
        "nats",
        "Mean loss per token of the newest finished step.",
        "coordinator",
        in_ray=True,
    ),
    Metric(
        "picotron_training_eval_loss_nats",
        "gauge",
        "nats",
        "Mean loss per token of the newest evaluation on held-out data.",
        "coordinator",
        in_ray=True,
    ),
    Metric(
        "picotron_training_eval_loss_before_nats",
        "gauge",
        "nats",
        "Mean held-out loss of tasks before their inner steps (meta.strategy); squared errors in regression.",
        "coordinator",
    ),
    Metric(
        "picotron_training_eval_set_loss_nats",
        "gauge",
        "nats",
        "Mean loss per token of the newest evaluation on a held-out set beside: one of evaluate.sets, or a"
        " source of data.sources.",
        "coordinator",
        labels=("set",),
    ),
    Metric(
        "picotron_training_baseline_loss_nats",
        "gauge",
        "nats",
        "Bigram entropy of the same data: what a model of pairs of tokens reaches.",
        "coordinator",
    ),
    Metric(
        "picotron_training_tokens_per_second",
        "gauge",
        "tokens_per_second",
        "Tokens of a global batch over the time of the newest finished step.",
        "coordinator",
        in_ray=True,
    ),
    Metric(
        "picotron_training_tokens_total",
        "counter",
        "tokens",
        "Tokens trained on since step 0; a step that a recovery repeats counts once.",
        "coordinator",
    ),
    Metric(
        "picotron_training_gradient_norm",
        "gauge",
        "1",
        "Global gradient norm of the newest finished step, before clipping.",
        "coordinator",
        in_ray=True,
    ),
    Metric(
        "picotron_training_learning_rate",
        "gauge",
        "1",
        "Learning rate of the newest finished step.",
        "coordinator",
        in_ray=True,
    ),
    Metric(
        "picotron_data_padding_ratio",
        "gauge",
        "ratio",
        "Share of the newest finished step's tokens that is padding, which counts nowhere.",
        "coordinator",
    ),
    Metric(
        "picotron_data_curriculum_stage",
        "gauge",
        "1",
        "Stage of the curriculum that fed the newest finished step, from 1 on; 0 without a curriculum.",
        "coordinator",
    ),
)

ELASTIC = (
    Metric(
        "picotron_elastic_state",
        "gauge",
        "1",
        "1 for the state that the coordinator's machine is in, 0 for every other.",
        "coordinator",
        ("state",),
    ),
    Metric(
        "picotron_elastic_workers",
        "gauge",
        "workers",
        "Members of the running generation.",
        "coordinator",
        in_ray=True,
    ),
    Metric(
        "picotron_elastic_generation",
        "gauge",
        "1",
        "Number of the running generation within its term.",
        "coordinator",
        in_ray=True,
    ),
    Metric(
        "picotron_elastic_term",
        "gauge",
        "1",
        "Number of the coordinator's term; one more after each restart of it.",
        "coordinator",
        in_ray=True,
    ),
    Metric(
        "picotron_elastic_generations_total",
        "counter",
        "generations",
        "Generations begun; each beyond the first is a re-mesh.",
        "coordinator",
    ),
    Metric(
        "picotron_elastic_failures_total",
        "counter",
        "failures",
        "Interruptions of training, by the gravest sign of each.",
        "coordinator",
        ("kind",),
    ),
    Metric(
        "picotron_elastic_recovery_seconds",
        "histogram",
        "seconds",
        "Time from the detection of a failure to the first finished new step.",
        "coordinator",
        buckets=RECOVERY_BUCKETS_S,
    ),
    Metric(
        "picotron_elastic_lost_steps_total",
        "counter",
        "steps",
        "Finished steps that recoveries had to repeat.",
        "coordinator",
    ),
    Metric(
        "picotron_elastic_planned_generations_total",
        "counter",
        "generations",
        "Generations by their layout's origin: planned, or default where the planner had not answered yet.",
        "coordinator",
        ("origin",),
    ),
    Metric(
        "picotron_elastic_adaptations_total",
        "counter",
        "adaptations",
        "Decisions of the adaptation loop, by kind of change: apply, kept, back (it hurt), void (its"
        " generation ended before it was judged), dropped (something more urgent went before it).",
        "coordinator",
        ("change", "action"),
    ),
    Metric(
        "picotron_elastic_planner_seconds",
        "histogram",
        "seconds",
        "Time of the planner's newest searches, which run beside training.",
        "coordinator",
        buckets=PLAN_BUCKETS_S,
    ),
    Metric(
        "picotron_elastic_events_total",
        "counter",
        "events",
        "Events for people, by level.",
        "coordinator",
        ("level",),
    ),
)

CHECKPOINT = (
    Metric(
        "picotron_checkpoint_commits_total",
        "counter",
        "commits",
        "Commits to storage that this coordinator knows of.",
        "coordinator",
    ),
    Metric(
        "picotron_checkpoint_newest_steps",
        "gauge",
        "steps",
        "Step of the newest commit.",
        "coordinator",
        in_ray=True,
    ),
    Metric(
        "picotron_checkpoint_age_seconds",
        "gauge",
        "seconds",
        "Time since the newest commit.",
        "coordinator",
    ),
    Metric(
        "picotron_checkpoint_size_bytes",
        "gauge",
        "bytes",
        "Stored size of the newest commit, chunks shared with older ones included.",
        "coordinator",
    ),
    Metric(
        "picotron_checkpoint_written_bytes_total",
        "counter",
        "bytes",
        "New chunks that commits put into storage.",
        "coordinator",
    ),
    Metric(
        "picotron_checkpoint_commit_seconds",
        "histogram",
        "seconds",
        "Time to write a commit's manifest and log entry, after its upload.",
        "coordinator",
        buckets=COMMIT_BUCKETS_S,
    ),
    Metric(
        "picotron_checkpoint_stall_seconds",
        "gauge",
        "seconds",
        "Longest time that a worker's optimizer waited for the newest commit's copy.",
        "coordinator",
    ),
)
