"""Which source wins, and what is said when none has an answer."""

import asyncio
import json

import pytest

from infra.fleet_file import FleetFile
from infra.settings import FleetDownError, Settings
from model.errors import ModelError
from proxy_runtime.errors import ErgoError


@pytest.fixture(autouse=True)
def _clean(monkeypatch, tmp_path):
    import os

    for name in list(os.environ):
        if name.startswith(("ERGO_", "TEMPORAL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ERGO_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TEMPORAL_CONFIG_FILE", str(tmp_path / "none.toml"))
    (tmp_path / "none.toml").write_text("")


def fleet_file(directory, **changes):
    file = FleetFile(
        **{
            "cluster": "c1",
            "temporal_address": "127.0.0.1:1",
            "kafka_bootstrap_servers": "127.0.0.1:2",
            "store_url": f"file://{directory}/store",
            "secret_file": directory / "secret",
            **changes,
        }
    )
    directory.mkdir(parents=True, exist_ok=True)
    file.write(directory)
    return file


def test_defaults(tmp_path):
    settings = Settings.load()
    assert settings.fleet_dir == tmp_path / "home" / "fleet"
    assert (settings.cluster, settings.store_url, settings.kafka_bootstrap_servers) == ("local", None, None)
    assert settings.fleet_file() is None


def test_the_fleet_file_comes_before_defaults_and_the_environment_before_both(tmp_path, monkeypatch):
    fleet_file(tmp_path / "f")
    settings = Settings.load(tmp_path / "f")
    assert (settings.cluster, settings.kafka().bootstrap_servers) == ("c1", ("127.0.0.1:2",))
    assert settings.store_url == f"file://{tmp_path}/f/store"
    monkeypatch.setenv("ERGO_CLUSTER", "c2")
    monkeypatch.setenv("ERGO_KAFKA_BOOTSTRAP_SERVERS", "a:1, b:2,")
    monkeypatch.setenv("ERGO_STORE_URL", "s3://bucket")
    settings = Settings.load(tmp_path / "f")
    assert (settings.cluster, settings.store_url) == ("c2", "s3://bucket")
    assert settings.kafka().bootstrap_servers == ("a:1", "b:2")


def test_an_argument_comes_before_the_environment(tmp_path, monkeypatch):
    fleet_file(tmp_path / "one", cluster="one")
    fleet_file(tmp_path / "two", cluster="two")
    monkeypatch.setenv("ERGO_FLEET_DIR", str(tmp_path / "two"))
    assert Settings.load().cluster == "two"
    assert Settings.load(tmp_path / "one").cluster == "one"


def test_an_empty_variable_is_no_setting(tmp_path, monkeypatch):
    fleet_file(tmp_path / "f")
    monkeypatch.setenv("ERGO_CLUSTER", "")
    assert Settings.load(tmp_path / "f").cluster == "c1"


def test_what_kafka_needs_to_trust_us(tmp_path, monkeypatch):
    for name, value in {
        "BOOTSTRAP_SERVERS": "broker:9093",
        "SECURITY_PROTOCOL": "SASL_SSL",
        "SASL_MECHANISM": "SCRAM-SHA-512",
        "SASL_PLAIN_USERNAME": "ergo",
        "SASL_PLAIN_PASSWORD": "not-to-be-seen",
        "SSL_CAFILE": str(tmp_path / "ca.pem"),
    }.items():
        monkeypatch.setenv(f"ERGO_KAFKA_{name}", value)
    settings = Settings.load()
    connection = settings.kafka()
    assert connection.security == {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_plain_username": "ergo",
        "sasl_plain_password": "not-to-be-seen",
        "ssl_cafile": str(tmp_path / "ca.pem"),
        "ssl_check_hostname": True,
    }
    assert "not-to-be-seen" not in f"{settings!r} {connection!r} {connection}"


def test_plain_text_needs_nothing(tmp_path):
    fleet_file(tmp_path / "f")
    assert Settings.load(tmp_path / "f").kafka().security == {}


@pytest.mark.parametrize("what", ["kafka", "secret", "fleet_store", "temporal_config"])
def test_without_a_fleet_there_is_one_sentence(tmp_path, what):
    with pytest.raises(FleetDownError) as caught:
        getattr(Settings.load(tmp_path / "nothing"), what)()
    assert str(caught.value) == "no fleet is up: `ergo up`"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ERGO_KAFKA_SECURITY_PROTOCOL", "TLS", "`ERGO_KAFKA_SECURITY_PROTOCOL` is 'TLS'"),
        ("ERGO_CLUSTER", "A B", "is 'A B'"),
    ],
)
def test_a_wrong_variable_is_named(monkeypatch, name, value, words):
    monkeypatch.setenv(name, value)
    with pytest.raises(ModelError, match=words) as caught:
        Settings.load()
    assert caught.value.code == "settings.invalid"


def test_a_damaged_fleet_file_is_named(tmp_path):
    (tmp_path / "fleet.json").write_text("{")
    with pytest.raises(ModelError, match=r"fleet\.json") as caught:
        Settings.load(tmp_path)
    assert caught.value.code == "fleet.file"


def test_a_secret_of_another_length_is_refused(tmp_path):
    fleet_file(tmp_path)
    (tmp_path / "secret").write_bytes(b"short")
    with pytest.raises(ErgoError, match="has 5 bytes, not 32"):
        Settings.load(tmp_path).secret()


def test_temporal_is_where_its_own_configuration_says(tmp_path, monkeypatch):
    fleet_file(tmp_path / "f")
    settings = Settings.load(tmp_path / "f")
    assert settings.temporal_config() == {"target_host": "127.0.0.1:1", "namespace": "default"}
    (tmp_path / "profile.toml").write_text('[profile.default]\naddress = "cloud:7233"\nnamespace = "team"\n')
    monkeypatch.setenv("TEMPORAL_CONFIG_FILE", str(tmp_path / "profile.toml"))
    config = settings.temporal_config()
    assert (config["target_host"], config["namespace"]) == ("cloud:7233", "team")
    monkeypatch.setenv("TEMPORAL_ADDRESS", "other:7233")
    assert settings.temporal_config()["target_host"] == "other:7233"


def test_a_wrong_profile_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "profile.toml").write_text("[profile")
    monkeypatch.setenv("TEMPORAL_CONFIG_FILE", str(tmp_path / "profile.toml"))
    with pytest.raises(ErgoError, match="Temporal's configuration is wrong"):
        Settings.load().temporal_config()


def test_a_temporal_that_does_not_answer(tmp_path, monkeypatch):
    fleet_file(tmp_path / "f")
    with pytest.raises(FleetDownError, match="does not answer: `ergo up`"):
        asyncio.run(Settings.load(tmp_path / "f").connect_temporal())
    monkeypatch.setenv("TEMPORAL_ADDRESS", "127.0.0.1:9")
    with pytest.raises(ErgoError, match="Check TEMPORAL_ADDRESS"):
        asyncio.run(Settings.load(tmp_path / "f").connect_temporal())


def test_the_real_one_answers_with_our_converter(tmp_path, temporal_server):
    from infra.converter import DATA_CONVERTER

    fleet_file(tmp_path / "f", temporal_address=temporal_server)
    client = asyncio.run(Settings.load(tmp_path / "f").connect_temporal())
    assert client.data_converter is DATA_CONVERTER


def test_a_file_of_a_later_version_is_refused(tmp_path):
    file = json.loads(fleet_file(tmp_path).model_dump_json())
    (tmp_path / "fleet.json").write_text(json.dumps({**file, "version": 2}))
    with pytest.raises(ModelError, match="version"):
        FleetFile.read(tmp_path)
