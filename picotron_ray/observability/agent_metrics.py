"""Metrics that every node's agent serves: its workers, the node and the GPUs."""

from __future__ import annotations

from picotron_ray.observability.metric import Metric

STEP_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)

_WORKER = ("worker",)
_COMMUNICATION = ("worker", "thing")
_GPU = ("gpu",)

WORKER = (
    Metric(
        "picotron_worker_step_seconds",
        "histogram",
        "seconds",
        "Time of every step that the worker finished, counted by the worker itself.",
        "agent",
        _WORKER,
        buckets=STEP_BUCKETS_S,
    ),
    Metric(
        "picotron_worker_resident_bytes",
        "gauge",
        "bytes",
        "Resident memory of the process.",
        "agent",
        _WORKER,
    ),
    Metric(
        "picotron_worker_cpu_seconds_total",
        "counter",
        "seconds",
        "CPU time that the process has used, all threads.",
        "agent",
        _WORKER,
    ),
    Metric(
        "picotron_worker_snapshot_seconds",
        "gauge",
        "seconds",
        "Time to copy and digest the newest snapshot, in the background.",
        "agent",
        _WORKER,
    ),
    Metric(
        "picotron_worker_snapshot_wait_seconds_total",
        "counter",
        "seconds",
        "Time that the optimizer waited for snapshots in the running generation.",
        "agent",
        _WORKER,
    ),
    Metric(
        "picotron_worker_skipped_snapshots_total",
        "counter",
        "snapshots",
        "Snapshots of the running generation that found no free slot.",
        "agent",
        _WORKER,
    ),
    Metric(
        "picotron_worker_pending_operations",
        "gauge",
        "operations",
        "Collectives issued and not yet waited for, as the worker's present phase began.",
        "agent",
        _WORKER,
    ),
    Metric(
        "picotron_worker_communication_predicted_seconds",
        "gauge",
        "seconds",
        "Time of the newest step's communication by the model of the way in use, on the slowest rank.",
        "agent",
        _COMMUNICATION,
    ),
    Metric(
        "picotron_worker_communication_measured_seconds",
        "gauge",
        "seconds",
        "Time that the newest step waited for communication, on the slowest rank.",
        "agent",
        _COMMUNICATION,
    ),
    Metric(
        "picotron_worker_cuda_allocated_bytes",
        "gauge",
        "bytes",
        "CUDA memory in tensors, as of the newest snapshot.",
        "agent",
        _WORKER,
        needs_gpu=True,
    ),
    Metric(
        "picotron_worker_cuda_reserved_bytes",
        "gauge",
        "bytes",
        "CUDA memory that torch's allocator holds, as of the newest snapshot.",
        "agent",
        _WORKER,
        needs_gpu=True,
    ),
    Metric(
        "picotron_worker_phase_seconds",
        "gauge",
        "seconds",
        "Seconds per step by phase, over the last 100 steps; the phases add up to the step.",
        "agent",
        ("worker", "phase", "statistic"),
    ),
    Metric(
        "picotron_worker_bubble_ratio",
        "gauge",
        "ratio",
        "Share of a step in which a pipeline rank waits for other stages.",
        "agent",
        _WORKER,
    ),
    Metric(
        "picotron_worker_sent_bytes",
        "gauge",
        "bytes",
        "Bytes that the worker sends per step, by axis of the layout.",
        "agent",
        ("worker", "axis"),
    ),
    Metric(
        "picotron_worker_peak_bytes",
        "gauge",
        "bytes",
        "Most memory of the generation: in CUDA tensors, or the resident set on a CPU.",
        "agent",
        _WORKER,
    ),
    Metric(
        "picotron_worker_largest_free_bytes",
        "gauge",
        "bytes",
        "Largest block of memory that the worker could still allocate.",
        "agent",
        _WORKER,
    ),
)

MEMORY = (
    Metric(
        "picotron_worker_memory_bytes",
        "gauge",
        "bytes",
        "Tensors of each class in the generation's accounted step, at the class's highest moment.",
        "agent",
        (*_WORKER, "class"),
    ),
    Metric(
        "picotron_worker_memory_peak_bytes",
        "gauge",
        "bytes",
        "All tensors of that step, at its highest moment.",
        "agent",
        _WORKER,
    ),
    Metric(
        "picotron_worker_memory_mode",
        "gauge",
        "1",
        "Share of the device that steps take: 0 up to 0.7, 1 above, 2 above 0.9 (memory-critical).",
        "agent",
        _WORKER,
    ),
)

NODE = (
    Metric("picotron_node_workers", "gauge", "workers", "Living workers on the node.", "agent"),
    Metric(
        "picotron_node_slot_bytes",
        "gauge",
        "bytes",
        "Snapshot slots of the run on the node.",
        "agent",
    ),
    Metric(
        "picotron_node_memory_file_system_free_bytes",
        "gauge",
        "bytes",
        "Free space where the snapshot slots are (snapshot.folder).",
        "agent",
    ),
    Metric(
        "picotron_node_served_snapshot_bytes_total",
        "counter",
        "bytes",
        "Snapshot bytes that members on other nodes have read from this one.",
        "agent",
    ),
    Metric(
        "picotron_node_log_lines_total",
        "counter",
        "lines",
        "Lines of the node's processes that were kept for `picotron-ray logs`.",
        "agent",
    ),
    Metric(
        "picotron_node_log_lost_lines_total",
        "counter",
        "lines",
        "Lines that were not kept: the disk was full, or a process wrote faster than it is read.",
        "agent",
    ),
)

GPU = (
    Metric(
        "picotron_gpu_utilization_ratio",
        "gauge",
        "ratio",
        "Share of the last sampling period in which a kernel ran.",
        "agent",
        _GPU,
        needs_gpu=True,
    ),
    Metric(
        "picotron_gpu_memory_used_bytes",
        "gauge",
        "bytes",
        "Memory in use by all processes.",
        "agent",
        _GPU,
        needs_gpu=True,
    ),
    Metric(
        "picotron_gpu_memory_size_bytes",
        "gauge",
        "bytes",
        "Memory of the GPU.",
        "agent",
        _GPU,
        needs_gpu=True,
    ),
    Metric(
        "picotron_gpu_temperature_celsius",
        "gauge",
        "celsius",
        "Temperature of the chip.",
        "agent",
        _GPU,
        needs_gpu=True,
    ),
    Metric(
        "picotron_gpu_power_watts",
        "gauge",
        "watts",
        "Power drawn by the board.",
        "agent",
        _GPU,
        needs_gpu=True,
    ),
    Metric(
        "picotron_gpu_ecc_errors_total",
        "counter",
        "errors",
        "Uncorrected memory errors in the life of the GPU.",
        "agent",
        _GPU,
        needs_gpu=True,
    ),
)
