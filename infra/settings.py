"""Where the parts of a fleet are: arguments, then `ERGO_*` of the environment, then `fleet.json`, then defaults.

Temporal is the exception: its address, namespace, keys and certificates come from temporalio's own environment
configuration (`TEMPORAL_ADDRESS`, `TEMPORAL_PROFILE`, ...), and from `fleet.json` where that names no address.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from events.connection import KafkaConnection
from infra.fleet_file import FleetFile
from model.codec import faults_of
from model.errors import Fault, ModelError
from model.units import parse_bytes
from proxy_runtime.errors import ErgoError
from proxy_runtime.home import ergo_home

if TYPE_CHECKING:
    from temporalio.client import Client
    from temporalio.envconfig import ClientConnectConfig

    from proxy_runtime.storage.fleet import FleetStore

SECRET_BYTES = 32
STOPPING = "stopping"
"""A file in the fleet's directory while `ergo down` works."""

_FROM_FILE = ("cluster", "store_url", "secret_file", "kafka_bootstrap_servers")


class FleetDownError(ErgoError):
    """There is no fleet to speak to."""

    code = "fleet.down"

    def __init__(self, message: str = "no fleet is up: `ergo up`", *, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)


def default_fleet_dir() -> Path:
    """`$ERGO_FLEET_DIR`, by default `$ERGO_HOME/fleet`; absolute."""
    return Path(os.environ.get("ERGO_FLEET_DIR") or ergo_home() / "fleet").expanduser().absolute()


class Settings(BaseSettings):
    """What a process has to know of its fleet. Every attribute is `ERGO_` and its name in the environment.

    Attributes:
        fleet_dir: of the local fleet: `fleet.json`, secret, store, logs and the nodes' directories.
        cluster: whose scheduler jobs of this fleet belong to.
        store_url: the fleet's bucket, ``file:///…``, ``s3://…``, ``gs://…`` or ``az://…``.
        secret_file: 32 bytes from which the keys of all tenants are derived.
        free_bytes: what has to stay free on a node's disk, and on that of a store that is a directory: a number of
            bytes, or such as ``16GiB``. With less no checkpoint is begun; 0: none is refused.
        keep_last_s: seconds for which the last checkpoint stays of a job that has ended without keeping its directory;
            None: `garbage.LAST_S`.
        kafka_bootstrap_servers: ``host:port``, comma-separated. The other `kafka_` attributes are what kafka-python
            calls by these names; passwords are never shown.
    """

    model_config = SettingsConfigDict(env_prefix="ERGO_", env_ignore_empty=True, extra="ignore", frozen=True)

    fleet_dir: Path = Field(default_factory=default_fleet_dir)
    cluster: str = Field(default="local", pattern=r"^[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?$")
    store_url: str | None = None
    secret_file: Path | None = None
    free_bytes: Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)] = 1 << 30
    keep_last_s: float | None = Field(default=None, ge=0)
    kafka_bootstrap_servers: str | None = None
    kafka_security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    kafka_sasl_mechanism: str | None = None
    kafka_sasl_plain_username: str | None = None
    kafka_sasl_plain_password: SecretStr | None = None
    kafka_ssl_cafile: Path | None = None
    kafka_ssl_certfile: Path | None = None
    kafka_ssl_keyfile: Path | None = None
    kafka_ssl_password: SecretStr | None = None
    kafka_ssl_check_hostname: bool = True

    @classmethod
    def load(cls, fleet_dir: Path | None = None) -> Settings:
        """Reads all sources; `fleet_dir` comes before `ERGO_FLEET_DIR`.

        Raises:
            ModelError: ``settings.invalid``; the message names the variables that are wrong.
        """
        try:
            return cls(fleet_dir=(fleet_dir or default_fleet_dir()).expanduser().absolute())
        except ValidationError as error:
            faults = [
                Fault(f"ERGO_{fault.where.upper()}", fault.what, fault.remedy) if "kafka" in fault.where else fault
                for fault in faults_of(error)
            ]
            raise ModelError.of_faults("Settings", faults, code="settings.invalid") from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, environment, `fleet.json`; no .env file of whatever directory one happens to be in."""
        return (init_settings, env_settings, _FleetFileSource(settings_cls))

    def fleet_file(self) -> FleetFile | None:
        """The local fleet's addresses; None where no `ergo up` has been here."""
        return FleetFile.read(self.fleet_dir)

    def node_dir(self, name: str) -> Path:
        """What a node of the local fleet owns; it reads no other node's."""
        return self.fleet_dir / "nodes" / name

    def going_down(self) -> bool:
        """Whether `ergo down` is ending the fleet: an agent that is told to end then ends its jobs' processes too."""
        return (self.fleet_dir / STOPPING).exists()

    def kafka(self) -> KafkaConnection:
        """How to reach Kafka.

        Raises:
            FleetDownError: neither the environment nor a fleet says where it is.
        """
        if not self.kafka_bootstrap_servers:
            raise FleetDownError
        servers = tuple(server.strip() for server in self.kafka_bootstrap_servers.split(",") if server.strip())
        return KafkaConnection(servers, self._kafka_security())

    def secret(self) -> bytes:
        """The fleet's secret.

        Raises:
            FleetDownError: there is none.
            ErgoError: ``settings.secret``: it is not 32 bytes, or not readable.
        """
        path = self.secret_file or self.fleet_dir / "secret"
        try:
            secret = path.read_bytes()
        except FileNotFoundError:
            raise FleetDownError from None
        except OSError as error:
            raise ErgoError(
                f"The fleet's secret {path} cannot be read: {error.strerror}.",
                code="settings.secret",
                remedy="Run as the user that the fleet belongs to.",
            ) from None
        if len(secret) != SECRET_BYTES:
            raise ErgoError(
                f"The fleet's secret {path} has {len(secret)} bytes, not {SECRET_BYTES}.",
                code="settings.secret",
                remedy="Bring back the file that the fleet was made with; without it no checkpoint can be read.",
            )
        return secret

    def fleet_store(self) -> FleetStore:
        """The fleet's records, packs, manifests and volumes.

        Raises:
            FleetDownError: neither the environment nor a fleet says where it is.
        """
        from proxy_runtime.storage.blobs import Bucket
        from proxy_runtime.storage.fleet import FleetStore

        if not self.store_url:
            raise FleetDownError
        secret = self.secret()
        return FleetStore(Bucket.open(self.store_url), secret)

    def temporal_config(self) -> ClientConnectConfig:
        """Arguments of `Client.connect`.

        Raises:
            FleetDownError: neither temporalio's configuration nor a fleet names an address.
            ErgoError: ``settings.temporal``: that configuration is wrong.
        """
        config = outside_temporal()
        if "target_host" in config:
            return config
        fleet = self.fleet_file()
        if fleet is None:
            raise FleetDownError
        config["target_host"] = fleet.temporal_address
        config.setdefault("namespace", fleet.temporal_namespace)
        return config

    async def connect_temporal(self, *, identity: str | None = None) -> Client:
        """Connects to Temporal with our data converter.

        Raises:
            FleetDownError: there is no fleet, or its Temporal does not answer.
            ErgoError: ``settings.temporal``: an outside Temporal does not answer.
        """
        from temporalio.client import Client

        from infra.converter import DATA_CONVERTER

        config = self.temporal_config()
        address = config.get("target_host", "")
        try:
            return await Client.connect(
                **config,  # pyright: ignore[reportArgumentType]
                data_converter=DATA_CONVERTER,
                runtime=_runtime(),
                identity=identity or f"{os.getpid()}@ergosphere",
            )
        except Exception as error:
            cause = str(error).splitlines()[0][:200]
            if "target_host" not in outside_temporal():
                raise FleetDownError(f"The fleet's Temporal at {address} does not answer: `ergo up`") from error
            raise ErgoError(
                f"Temporal at {address} does not answer ({cause}).",
                code="settings.temporal",
                remedy="Check TEMPORAL_ADDRESS and the profile that TEMPORAL_PROFILE names.",
            ) from error

    def _kafka_security(self) -> dict[str, Any]:
        options: dict[str, Any] = {"security_protocol": self.kafka_security_protocol}
        for name in ("sasl_mechanism", "sasl_plain_username", "sasl_plain_password"):
            options[name] = getattr(self, f"kafka_{name}")
        for name in ("ssl_cafile", "ssl_certfile", "ssl_keyfile", "ssl_password"):
            options[name] = getattr(self, f"kafka_{name}")
        if "SSL" in self.kafka_security_protocol:
            options["ssl_check_hostname"] = self.kafka_ssl_check_hostname
        plain = {SecretStr: lambda value: value.get_secret_value(), type(Path()): str}
        return {
            name: plain.get(type(value), lambda same: same)(value)
            for name, value in options.items()
            if value is not None and (name, value) != ("security_protocol", "PLAINTEXT")
        }


def outside_temporal() -> ClientConnectConfig:
    """What temporalio's environment configuration says; without `target_host` there is no outside Temporal.

    Raises:
        ErgoError: ``settings.temporal``: a file or a variable of it is wrong.
    """
    from temporalio.envconfig import ClientConfigProfile

    try:
        return ClientConfigProfile.load().to_client_connect_config()
    except Exception as error:
        raise ErgoError(
            f"Temporal's configuration is wrong: {str(error).splitlines()[0][:200]}.",
            code="settings.temporal",
            remedy="Correct the TEMPORAL_ variables, or the profile file that they name.",
        ) from error


class _FleetFileSource(PydanticBaseSettingsSource):
    """What `fleet.json` says."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False  # all at once, in __call__

    def __call__(self) -> dict[str, Any]:
        found = FleetFile.read(Path(self.current_state.get("fleet_dir") or default_fleet_dir()))
        return {name: getattr(found, name) for name in _FROM_FILE} if found else {}


@functools.cache
def _runtime() -> Any:
    """The SDK's runtime: its core logs through Python's logging; left to itself it writes megabytes to stdout."""
    import logging

    from temporalio.runtime import LogForwardingConfig, LoggingConfig, Runtime, TelemetryConfig, TelemetryFilter

    forwarding = LogForwardingConfig(logging.getLogger("temporalio.core"))
    logs = LoggingConfig(TelemetryFilter(core_level="WARN", other_level="ERROR"), forwarding=forwarding)
    return Runtime(telemetry=TelemetryConfig(logging=logs))
