"""Several ranks of a job on one device: what it costs beside a device each, what is kept, how long a resize takes."""

from benchmarks.elastic import fleet_resize, overhead, resize, sharing, verified

__all__ = ["fleet_resize", "overhead", "resize", "sharing", "verified"]
