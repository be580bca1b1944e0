"""pubsub.jars: finding Java and Delta's files."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from py4j.java_gateway import GatewayParameters, JavaGateway
from py4j.protocol import Py4JError

from pubsub import jars, java_classes
from pubsub.errors import DataCorrupted, PubsubError


def make_java(directory: Path, *lines: str) -> Path:
    program = directory / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("output", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_402"', 8),
        ('openjdk version "25" 2025-09-16 LTS', 25),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "21.0.2" 2024-01-16', 21),
        ("The operation couldn't be completed. Unable to locate a Java Runtime.", None),
    ],
)
def test_java_version(output: str, version: int | None) -> None:
    assert jars.java_version(output) == version


def test_no_java_on_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PubsubError, match="could not find Java") as caught:
        jars.require_java()
    assert caught.value.hint is not None
    assert "Java 17" in caught.value.hint
    assert jars.cds_archive() is None


def test_java_home_goes_before_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(PubsubError) as caught:
        jars.require_java()
    assert str(tmp_path) in (caught.value.detail or "")
    program = make_java(tmp_path, "echo 'openjdk version \"21.0.2\" 2024-01-16' >&2")
    assert jars.find_java() == program
    assert jars.require_java() == 21


def test_java_too_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = make_java(tmp_path, "echo 'java version \"1.8.0_402\"' >&2")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(PubsubError, match="needs Java 17 or later, and found Java 8") as caught:
        jars.require_java()
    assert str(program) in (caught.value.detail or "")


def test_java_that_does_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_java(tmp_path, "echo 'no runtime here' >&2", "exit 2")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(PubsubError, match="could not tell the version") as caught:
        jars.require_java()
    assert caught.value.detail == "no runtime here"


def test_class_path_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PUBSUB_JARS", str(tmp_path))
    with pytest.raises(PubsubError, match="delta-spark") as caught:
        jars.class_path()
    assert "pubsub setup" in (caught.value.hint or "")
    names = [*(artifact.filename for artifact in jars.DELTA), java_classes.jar_name()]
    for name in names:
        (tmp_path / name).touch()
    assert jars.class_path() == [tmp_path / name for name in names]


def test_the_archive_belongs_to_one_java_and_one_class_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for jar in (*(artifact.filename for artifact in jars.DELTA), java_classes.jar_name()):
            (tmp_path / name / jar).touch()
        make_java(tmp_path / f"java-{name}")
    paths = set()
    for directory in ("one", "two"):
        for java in ("java-one", "java-two"):
            monkeypatch.setenv("PUBSUB_JARS", str(tmp_path / directory))
            monkeypatch.setenv("JAVA_HOME", str(tmp_path / java))
            path = jars.cds_archive_path()
            assert path is not None
            assert jars.cds_archive() is None
            path.touch()
            assert jars.cds_archive() == path
            paths.add(path)
    assert len(paths) == 4


def ivy_that_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str) -> None:
    """Install a `java` that acts as Ivy and writes the requested file into the directory of the pattern."""
    make_java(
        tmp_path / "java",
        'if [ "$1" = -version ]; then echo \'openjdk version "17"\' >&2; exit; fi',
        'for last; do :; done; printf "%s" "' + content + '" > "$(dirname "$last")/thing-1.0.jar"',
    )
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "java"))


def test_fetch_keeps_only_what_it_expected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    artifact = jars.Artifact("org.example", "thing", "1.0", hashlib.sha256(b"right").hexdigest())
    into = tmp_path / "jars"
    ivy_that_writes(monkeypatch, tmp_path, "wrong")
    with pytest.raises(DataCorrupted, match=r"thing-1\.0\.jar"):
        jars.fetch([artifact], into)
    assert list(into.iterdir()) == []


def test_fetch_takes_what_is_missing_and_leaves_what_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    artifact = jars.Artifact("org.example", "thing", "1.0", hashlib.sha256(b"right").hexdigest())
    into = tmp_path / "jars"
    ivy_that_writes(monkeypatch, tmp_path, "right")
    assert jars.fetch([artifact], into) == [into / "thing-1.0.jar"]
    assert (into / "thing-1.0.jar").read_bytes() == b"right"
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "no java needed"))
    assert jars.fetch([artifact], into) == [into / "thing-1.0.jar"]


def test_a_failed_fetch_shows_ivys_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_java(
        tmp_path / "java",
        'if [ "$1" = -version ]; then echo \'openjdk version "17"\' >&2; exit; fi',
        "echo '  WARN: org.example#thing;1.0: not found'; exit 1",
    )
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "java"))
    artifact = jars.Artifact("org.example", "thing", "1.0", "0" * 64)
    with pytest.raises(PubsubError, match=r"could not fetch thing-1\.0\.jar") as caught:
        jars.fetch([artifact], tmp_path / "jars")
    assert "org.example#thing;1.0: not found" in (caught.value.detail or "")


def test_several_versions_of_one_artifact_are_asked_for_at_once() -> None:
    module = ET.fromstring(jars._ivy_module([jars.Artifact("g", "n", version, "") for version in ("1", "2")]))
    assert [each.get("rev") for each in module.iter("dependency")] == ["1", "2"]
    assert [each.get("manager") for each in module.iter("conflict")] == ["all"]


def test_main_reports_errors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert jars.main(["check"]) == 1
    assert capsys.readouterr().err.startswith("ERROR:  could not find Java")
    assert jars.main([]) == 2


def test_importing_the_package_imports_no_more_than_it_must() -> None:
    import subprocess

    code = "import sys, pubsub; print(sorted(name for name in sys.modules if name in {'numpy', 'pyarrow', 'pyspark', 'sqlalchemy'}))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_public_names() -> None:
    import pubsub

    assert pubsub.PubsubError is PubsubError
    assert pubsub.Lsn(1)
    assert {"Lsn", "Node", "PubsubError"} <= set(dir(pubsub))
    with pytest.raises(AttributeError, match="nothing"):
        pubsub.nothing  # noqa: B018


@pytest.mark.full
def test_the_jvm_that_compiles_asks_who_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any user of the machine could otherwise run code in it, as the one who sets pubsub up."""
    refused: list[str] = []
    launch = JavaGateway.launch_gateway

    def launched(*arguments: Any, **named: Any) -> JavaGateway:
        gateway = launch(*arguments, **named)
        stranger = JavaGateway(gateway_parameters=GatewayParameters(port=gateway.gateway_parameters.port))
        try:
            stranger.jvm.java.lang.System.getProperty("user.name")
        except Py4JError as error:
            refused.append(str(error))
        stranger.close()
        return gateway

    monkeypatch.setattr(JavaGateway, "launch_gateway", launched)
    delta = [path for path in jars.class_path() if not path.name.startswith("pubsub-")]
    assert java_classes.build(tmp_path, delta).is_file()
    assert len(refused) == 1
