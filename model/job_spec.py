"""JobSpec v1: what a person asks for. Its JSON is the input of a job's workflow; any Temporal client can write it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from model.codec import as_json, beyond_json, faults_of, parse_json, show
from model.errors import Fault, ModelError
from model.ids import CheckpointId, JobId, TenantId
from model.splicing import widths
from model.units import Bytes, counted

API_VERSION = "ergosphere/v1"
UNEVEN = "model.uneven"
_MAX_RANKS = 1 << 20

_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
# Set by the runtime for every rank; a value of the user's would be overwritten in silence.
RESERVED_VARIABLES = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONHASHSEED"}
)
RESERVED_PREFIX = "ERGO_"
_LOOKS_SECRET = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|(?:API|SECRET|ACCESS|PRIVATE)_?KEY)$", re.IGNORECASE
)

Text = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]
Variable = Annotated[str, Field(max_length=256, pattern=_VARIABLE)]
Value = Annotated[str, Field(max_length=128 * 1024, pattern=r"^[^\x00]*$")]


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)


class Tier(StrEnum):
    """How much of the device time asked for a job is promised, and in which order jobs give way."""

    PREMIUM = "premium"
    STANDARD = "standard"
    BASIC = "basic"


class UploadedVolume(_Shape):
    """A directory that `ergo submit` has put into the chunk store."""

    kind: Literal["upload"] = "upload"
    manifest: CheckpointId = Field(description="Root of the uploaded directory's manifest.")


class PathVolume(_Shape):
    """A directory that every node sees under the same path."""

    kind: Literal["path"] = "path"
    path: Annotated[str, Field(max_length=4096, pattern=r"^/[^\x00]*$")] = Field(description="Absolute path.")


class EmptyVolume(_Shape):
    """An empty directory."""

    kind: Literal["empty"] = "empty"


class Secret(_Shape):
    """A variable whose value is looked up on the node. Its value is never part of a spec, an event or a history."""

    variable: Variable = Field(description="Name of the environment variable.")
    reference: Annotated[str, Field(max_length=1024, pattern=r"^[a-z][a-z0-9-]*:[^\x00\s]+$")] = Field(
        description="Where the node finds the value, as provider:name."
    )


class Retries(_Shape):
    """How often a job is started again."""

    failure: int = Field(
        default=0, ge=0, le=1000, description="After a failure of the user's program (exit code not 0)."
    )
    no_progress: int = Field(
        default=3,
        ge=0,
        le=1000,
        description="After a loss of ours, in a row without a step of progress, or a new checkpoint of a script "
        "without steps; then the job fails.",
    )


class CheckpointPolicy(_Shape):
    """When the job is checkpointed without being asked, and where a cut is taken."""

    every_s: int | None = Field(default=600, ge=1, description="Seconds between periodic checkpoints; null for none.")
    keep: int = Field(default=2, ge=1, le=10_000, description="How many of the newest checkpoints are kept.")
    cut: Literal["step", "now"] = Field(default="step", description="Prefer the end of a step, or cut at once.")
    step_deadline_s: float = Field(
        default=30.0,
        gt=0,
        le=86_400,
        description="How long the end of a step is waited for; then, or where the last one is longer ago than that, "
        "the cut is taken at once.",
    )


class After(_Shape):
    """A job that must have ended before this one starts."""

    job: JobId
    ended: Literal["completed", "any"] = Field(default="completed", description="How it must have ended.")


def _narrowest(sound: dict[str, Any]) -> int:
    """What starts its own ranks has its devices for life: nobody has to say that twice."""
    return cast("int", sound.get("devices_per_rank", 1)) if sound.get("pack") == "node" else 1


class JobSpec(_Shape):
    """A job. Units are in the names; all sizes are in bytes.

    Read one with `parse_job_spec`, which reports every fault at once.
    """

    api_version: Literal["ergosphere/v1"] = Field(alias="apiVersion", description="Version of this shape.")
    name: Annotated[str, Field(max_length=128, pattern=r"^[^\x00-\x1f]+$")] = Field(
        default="job", description="What people call it; need not be unique."
    )
    tenant: TenantId = Field(default=TenantId("default"), description="Who the job belongs to.")
    tier: Tier = Field(default=Tier.STANDARD, description="Service level.")
    priority: int = Field(default=0, ge=-1000, le=1000, description="Order within tier and tenant; higher is earlier.")

    argv: tuple[Text, ...] = Field(min_length=1, max_length=4096, description="The command, run without a shell.")
    volume: Annotated[UploadedVolume | PathVolume | EmptyVolume, Field(discriminator="kind")] = Field(
        default=EmptyVolume(), description="The job directory; the command runs in it."
    )
    environment: dict[Variable, Value] = Field(
        default_factory=dict[Variable, Value], description="Variables in plain text."
    )
    secrets: tuple[Secret, ...] = Field(default=(), description="Variables whose values are looked up on the node.")

    ranks: int = Field(default=1, ge=1, le=_MAX_RANKS, description="Process groups that the runtime starts.")
    pack: Literal["rank", "node"] = Field(
        default="rank",
        description="rank: each rank is one process that we start. node: the command starts its own ranks, and its "
        "process tree stays on one node as a whole.",
    )
    devices_per_rank: int = Field(
        default=1, ge=1, le=1024, description="Devices that one process group sees, for life."
    )
    accelerator: Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]*$")] | None = Field(
        default=None, description="Model of the devices, e.g. cpu or H200; null for any."
    )
    host_memory_bytes: Bytes | None = Field(default=None, description="Limit of one process group's host memory.")
    device_memory_bytes: Bytes | None = Field(default=None, description="Memory of one device as a rank sees it.")
    min_width: int = Field(
        default_factory=_narrowest,
        ge=1,
        description="Fewest devices that the job may run on. With pack: node at least, and by default, "
        "devices_per_rank.",
        json_schema_extra={"default": 1},
    )
    max_width: int | None = Field(default=None, ge=1, description="Most devices; null for one per virtual device.")

    retries: Retries = Retries()
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    device_time_limit_s: int | None = Field(
        default=None,
        ge=1,
        description="Seconds of device time delivered, over all devices, after which the job is ended.",
    )
    network: Literal["isolated", "host", "none"] = Field(
        default="isolated", description="isolated: a network of the job's own with a way out."
    )
    on_lost_lease: Literal["run", "freeze"] = Field(
        default="run", description="What ranks do while their node is cut off; freeze for jobs that act on the outside."
    )
    after: tuple[After, ...] = Field(
        default=(), max_length=1000, description="Jobs that must end before this one starts."
    )

    @property
    def world_size(self) -> int:
        """Number of virtual devices: the width at which nothing is spliced."""
        return self.ranks * self.devices_per_rank

    @property
    def widest(self) -> int:
        """The greatest width allowed."""
        return self.world_size if self.max_width is None else self.max_width

    @model_validator(mode="after")
    def _fits_together(self, info: ValidationInfo) -> Self:
        context = cast("Mapping[str, Any]", info.context or {})
        faulty = cast("frozenset[str]", context.get("faulty", frozenset()))
        faults = [fault for fields, check in _CHECKS if not faulty.intersection(fields) for fault in check(self)]
        if faults:
            raise ModelError.of_faults("JobSpec", faults, code="model.job-spec")
        return self

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON Schema (2020-12) of JobSpec v1."""
        schema = cls.model_json_schema(by_alias=True)
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}

    def to_json(self) -> bytes:
        """Writes the spec; `parse_job_spec` reads it back."""
        return self.model_dump_json(by_alias=True).encode()


def parse_submitted_spec(data: bytes | str | Mapping[str, Any]) -> JobSpec:
    """The same of what a fleet is asked to run: what it cannot do yet is refused.

    Raises:
        ModelError: as `parse_job_spec`; ``model.uneven``: a job of such widths, which builds of before have begun.
    """
    spec = parse_job_spec(data)
    if spec.pack == "node" and spec.ranks > 1:
        fault = Fault(
            "ranks",
            f"is {spec.ranks}, but a command that starts its own ranks (`pack: node`) is started once, on one node",
            "Leave it out, and say with `devices_per_rank` how many devices the command sees.",
        )
        raise ModelError.of_faults("JobSpec", [fault], code="model.job-spec")
    if uneven := list(_uneven(spec)):
        raise ModelError.of_faults("JobSpec", uneven, code=UNEVEN)
    return spec


def parse_job_spec(data: bytes | str | Mapping[str, Any]) -> JobSpec:
    """Reads a JobSpec from JSON text, or from a mapping that a JSON or YAML file gave.

    Raises:
        ModelError: ``model.json`` where the text is not JSON; ``model.job-spec`` with every fault of the spec, each a
            sentence that says where, what and the remedy.
    """
    value = parse_json("JobSpec", data) if isinstance(data, bytes | str) else data
    if not isinstance(value, Mapping):
        fault = Fault(
            "the whole", f"is {show(value)}, but must be a mapping of fields", "Write `apiVersion: ...` first."
        )
        raise ModelError.of_faults("JobSpec", [fault], code="model.job-spec")
    if faults := beyond_json(cast("object", value)):
        raise ModelError.of_faults("JobSpec", faults, code="model.json")
    fields = dict(cast("Mapping[str, Any]", value))
    if fields.get("apiVersion", API_VERSION) != API_VERSION:
        # Nothing that v1 knows can be said about the fields of another version.
        fault = Fault(
            "apiVersion",
            f"is {show(fields['apiVersion'])}, but this build reads {API_VERSION}",
            "Use a build that reads it.",
        )
        raise ModelError.of_faults("JobSpec", [fault], code="model.job-spec")
    try:
        return _validate(fields, frozenset())
    except ValidationError as error:
        faults = list(_faults(error))
        # Checks over several fields only run once each field is sound: leave the faulty ones out and look again.
        faulty = frozenset(str(finding["loc"][0]) for finding in error.errors() if finding["loc"])
        rest = {key: item for key, item in fields.items() if key not in faulty}
        if faulty:
            try:
                _validate({"apiVersion": API_VERSION, "argv": ["true"], **rest}, faulty)
            except ValidationError as second:
                faults += _faults(second)
        raise ModelError.of_faults("JobSpec", faults, code="model.job-spec") from None


def _validate(fields: Mapping[str, object], faulty: frozenset[str]) -> JobSpec:
    text = as_json("JobSpec", fields)
    return JobSpec.model_validate_json(text, context={"faulty": faulty}, by_alias=True, by_name=False)


def _faults(error: ValidationError) -> tuple[Fault, ...]:
    return faults_of(error, tuple(field.alias or name for name, field in JobSpec.model_fields.items()))


def _check_widths(spec: JobSpec) -> Iterator[Fault]:
    world = spec.world_size
    if spec.widest > world:
        yield Fault(
            "max_width",
            f"is {spec.max_width}, but the job has {world} virtual devices (ranks x devices_per_rank)",
            f"Set it to {world} or less.",
        )
    whole = spec.devices_per_rank if spec.pack == "node" else 1
    few = [where for where, width in (("min_width", spec.min_width), ("max_width", spec.widest)) if width < whole]
    for where in few[:1]:
        yield Fault(
            where,
            f"is {getattr(spec, where)}, but what starts its own ranks (`pack: node`) has {counted(whole, 'device')} "
            "for life",
            "Leave it out.",
        )
    if not few and spec.min_width > spec.widest:
        yield Fault("min_width", f"is {spec.min_width}, but the widest allowed is {spec.widest}", "Lower it.")


def _uneven(spec: JobSpec) -> Iterator[Fault]:
    """A resize gives every device as many ranks: a bound at which that cannot be would never be reached."""
    world = spec.world_size
    for where, width in (("min_width", spec.min_width), ("max_width", spec.widest)):
        if spec.pack == "rank" and world % width:
            possible = ", ".join(map(str, widths(world)))
            yield Fault(
                where,
                f"is {width}, but {counted(world, 'rank')} cannot be shared out evenly over {counted(width, 'device')}",
                f"Possible are {possible}.",
            )


def _check_pack(spec: JobSpec) -> Iterator[Fault]:
    if spec.pack == "rank" and spec.devices_per_rank > 1:
        yield Fault(
            "devices_per_rank",
            f"is {spec.devices_per_rank}, but with `pack: rank` a rank sees one device",
            "Set it to 1 and raise `ranks`, or use `pack: node` for a command that starts its own ranks.",
        )
    if spec.world_size > _MAX_RANKS:
        yield Fault(
            "ranks", f"gives {spec.world_size} virtual devices, but at most {_MAX_RANKS} are possible", "Lower it."
        )


def _check_variables(spec: JobSpec) -> Iterator[Fault]:
    secrets = [secret.variable for secret in spec.secrets]
    for where, name in [
        *(("environment", name) for name in spec.environment),
        *(("secrets", name) for name in secrets),
    ]:
        if name in RESERVED_VARIABLES or name.startswith(RESERVED_PREFIX):
            yield Fault(where, f"sets {name}, which the runtime sets itself", "Remove it.")
    for name in spec.environment:
        if _LOOKS_SECRET.search(name):
            yield Fault(
                "environment",
                f"holds {name}, whose name says that it is a secret, and a spec is stored in plain text",
                "Give a reference to it under `secrets`.",
            )
    for name in sorted({name for name in secrets if secrets.count(name) > 1 or name in spec.environment}):
        yield Fault("secrets", f"sets {name}, which is set twice", "Keep one of them.")


def _check_after(spec: JobSpec) -> Iterator[Fault]:
    jobs = [after.job for after in spec.after]
    for job in sorted({job for job in jobs if jobs.count(job) > 1}):
        yield Fault("after", f"names the job {job} twice", "Keep one of them.")


# Each with the fields it looks at: where one of them is faulty itself, the check says nothing.
_CHECKS: tuple[tuple[frozenset[str], Callable[[JobSpec], Iterator[Fault]]], ...] = (
    (frozenset({"ranks", "devices_per_rank", "pack", "min_width", "max_width"}), _check_widths),
    (frozenset({"ranks", "devices_per_rank", "pack"}), _check_pack),
    (frozenset({"environment", "secrets"}), _check_variables),
    (frozenset({"after"}), _check_after),
)
