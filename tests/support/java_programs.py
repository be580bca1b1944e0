"""Java programs of the tests (java/), with the jars that they need, fetched once beside Spark's."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pubsub import jars
from pubsub.jars import Artifact

_SOURCES: Final = Path(__file__).with_name("java")

POSTGRESQL: Final = (
    Artifact(
        "org.postgresql",
        "postgresql",
        "42.7.7",
        "157963d60ae66d607e09466e8c0cdf8087e9cb20d0159899ffca96bca2528460",
    ),
)

# Debezium's engine and connector, and what of Kafka Connect they load; its REST server is left out.
DEBEZIUM: Final = (
    *POSTGRESQL,
    Artifact(
        "org.apache.commons",
        "commons-lang3",
        "3.12.0",
        "d919d904486c037f8d193412da0c92e22a9fa24230b9d67a57855c5c31c7e94e",
    ),
    Artifact(
        "org.apache.kafka",
        "connect-api",
        "4.1.1",
        "9e8fe3277d31410e3dd6c84b34967230bb5643b8424d3b96320ce1c43b4b5152",
    ),
    Artifact(
        "org.apache.kafka",
        "connect-json",
        "4.1.1",
        "bcfd54f2e5529461df2ed3698b6471e9e8924eb2f84b72b8b2581fc8e7ba6e17",
    ),
    Artifact(
        "org.apache.kafka",
        "connect-runtime",
        "4.1.1",
        "01600f8b4e3a26016ba3f87e12f1fec7945673a9654ee7fb93b3591e47837ed6",
    ),
    Artifact(
        "org.apache.kafka",
        "connect-transforms",
        "4.1.1",
        "419ccbd1bbd345e99c884d3d0f82f632a97b9e14a198c57a5890d0b8d05282ad",
    ),
    Artifact(
        "io.debezium",
        "debezium-api",
        "3.4.1.Final",
        "16a7c929e799c8dd0b3de535d1a2ceb69b1b4fa0103672baeca8c158f8b0e7ac",
    ),
    Artifact(
        "io.debezium",
        "debezium-common",
        "3.4.1.Final",
        "189db8c8b107a8e7c5b915a95333d96a0ddb520cd9602bd5a8d74ba1d0ee7cdf",
    ),
    Artifact(
        "io.debezium",
        "debezium-connector-postgres",
        "3.4.1.Final",
        "39d897578821f8bd664961a4830452a065a436e3b2f75a55e3ad8c8fa6b29caf",
    ),
    Artifact(
        "io.debezium",
        "debezium-core",
        "3.4.1.Final",
        "a953a718e07d7b1a8c369da62c3baaa3c0e9ac70450a82501d8482c6bbfe1f87",
    ),
    Artifact(
        "io.debezium",
        "debezium-embedded",
        "3.4.1.Final",
        "a919a7f0258a04437de202e3c610cde06e5edba85e3c3a06d6ebd2a820fa2e0e",
    ),
    Artifact(
        "io.debezium",
        "debezium-openlineage-api",
        "3.4.1.Final",
        "aedf7837df885a87c1c33ab655ad882d61503e67ba03e13b5d9f48f7a7c048f1",
    ),
    Artifact(
        "io.debezium",
        "debezium-storage-file",
        "3.4.1.Final",
        "b0c2f3e920590ff9a642605be9c32f3764e6bfe596b468607d0df152dcdbde5b",
    ),
    Artifact(
        "com.fasterxml.jackson.core",
        "jackson-annotations",
        "2.19.0",
        "ead60e9cac0e42b57092b9e2d087ff43536e9477d4486ba393037a8cc156cda7",
    ),
    Artifact(
        "com.fasterxml.jackson.core",
        "jackson-core",
        "2.19.0",
        "da8e859bac94874528116a25f20c68560e4287acbf27628711b8a4f96b028430",
    ),
    Artifact(
        "com.fasterxml.jackson.core",
        "jackson-databind",
        "2.19.0",
        "ceda311f476c3b18e1d2b240c94e2dcb9c8d44e70f8afa9facab88bac4ddc03a",
    ),
    Artifact(
        "com.fasterxml.jackson.datatype",
        "jackson-datatype-jdk8",
        "2.19.0",
        "04f1a3f9da8155995dd00098d6847cdb9b7af67f4a3028c94031eff017c8e3e5",
    ),
    Artifact(
        "com.fasterxml.jackson.datatype",
        "jackson-datatype-jsr310",
        "2.19.0",
        "0ee97bf32936349d6a4cf6d8428533bf4a4b5b3e7e55fd9a4f19508ce062a775",
    ),
    Artifact(
        "com.fasterxml.jackson.module",
        "jackson-module-blackbird",
        "2.19.0",
        "9d038d1232aa7ab4927e5ac97e311e4483864e4c2cbba5de8a224dc09c28952d",
    ),
    Artifact(
        "org.apache.kafka",
        "kafka-clients",
        "4.1.1",
        "00247122a572c3d3ae4eb60a50192a5811bc0181f51923d13018600f892e821d",
    ),
    Artifact(
        "org.apache.maven",
        "maven-artifact",
        "3.9.6",
        "ad7a0fb408f8e47585ccc0d0011e0b501d93bfc9888d369bbd4a043d19475073",
    ),
    Artifact(
        "org.codehaus.plexus",
        "plexus-utils",
        "3.5.1",
        "86e0255d4c879c61b4833ed7f13124e8bb679df47debb127326e7db7dd49a07b",
    ),
    Artifact(
        "com.google.protobuf",
        "protobuf-java",
        "3.25.5",
        "8540247fad9e06baefa8fb45eb313802d019f485f14300e0f9d6b556ed88e753",
    ),
    Artifact(
        "org.slf4j",
        "slf4j-api",
        "1.7.36",
        "d3ef575e3e4979678dc01bf1dcce51021493b4d11fb7f1be8ad982877c16a1c0",
    ),
)


def has_compiler() -> bool:
    """Whether there is a JDK: a Java alone cannot run the programs."""
    return shutil.which("javac") is not None


def command(name: str, artifacts: Sequence[Artifact], *options: str) -> list[str]:
    """Return the command that runs `name`.java with these jars; the program's arguments follow it."""
    directory = jars.share_directory() / "test-jars"
    paths = jars.fetch(artifacts, directory)
    java = jars.find_java()
    return [
        *(str(java), "-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", *options),
        *("-cp", os.pathsep.join(map(str, paths)), str(_SOURCES / f"{name}.java")),
    ]


def run(name: str, artifacts: Sequence[Artifact], *arguments: str, timeout: float = 120.0) -> list[str]:
    """Run a program to its end, and return the lines that it printed."""
    ran = subprocess.run(
        [*command(name, artifacts), *arguments], capture_output=True, text=True, check=False, timeout=timeout
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()
