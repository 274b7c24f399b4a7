"""What the process imports from which the pool's workers are forked, and nothing that starts a thread."""

import picotron_ray.runtime.worker.generation
import picotron_ray.train.engine  # noqa: F401
import tests.support.gloo.parallel_jobs.matrix_jobs  # noqa: F401
