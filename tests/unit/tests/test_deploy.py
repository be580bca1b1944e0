"""deploy/: each alert fires for what it is for and for nothing else; rules and dashboard name metrics that there are."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from pubsub.monitoring.endpoint import Endpoint
from pubsub.monitoring.metrics import exposition, families
from pubsub.monitoring.node import NodeSource
from pubsub.settings import Settings
from tests.support import promtool
from tests.unit.pubsub.monitoring.test_metrics import picture

DEPLOY: Final = Path(__file__).parents[3] / "deploy"
RULES: Final = DEPLOY / "prometheus" / "pubsub.rules.yml"
DASHBOARD: Final = DEPLOY / "grafana" / "pubsub.json"
_NAME: Final = re.compile(r"\b(?:pg|pubsub|debezium|process|python)_\w+")

#: A node that is well, for two hours: series without their common labels, and values as promtool writes them.
WELL: Final = {
    "up": "1x120",
    "pg_subscription_subenabled{S}": "1x120",
    "pubsub_subscription_error{S}": "0x120",
    "pubsub_subscription_workers{S}": "1x120",
    "pubsub_publisher_up{S}": "1x120",
    "pubsub_walsender_upstream_up": "1x120",
    "pubsub_jvm_heap_max_bytes": "1000000000x120",
    # It fills up, and is collected every ten minutes.
    "pubsub_jvm_heap_used_bytes": " ".join(["100000000+100000000x9"] * 12),
    "pg_stat_subscription_lag_seconds{S}": "2x120",
    'pg_replication_slots_retained_bytes{S,slot_name="s"}': "1000000x120",
    'pg_replication_slots_safe_wal_size{S,slot_name="s"}': "9000000000x120",
    'pg_replication_slots_wal_status{S,slot_name="s",pg_replication_slots_wal_status="reserved"}': "1x120",
    'pg_replication_slots_wal_status{S,slot_name="s",pg_replication_slots_wal_status="unreserved"}': "0x120",
    'pg_replication_slots_wal_status{S,slot_name="s",pg_replication_slots_wal_status="lost"}': "0x120",
    "pubsub_table_stopped{S,T}": "0x120",
    'pg_subscription_rel_srsubstate{S,T,srsubstate="d"}': "1x120",
    "pg_stat_progress_copy_tuples_processed{S,T}": "0+100x120",
    "pg_stat_subscription_stats_confl_update_missing_total{S}": "3x120",
    "pg_stat_subscription_stats_confl_insert_exists_total{S}": "0x120",
    "pubsub_verification_equal{S,T}": "1x120",
    "pubsub_verification_failed{S,T}": "0x120",
    "pubsub_verification_interval_seconds": "1800x120",
    "pubsub_verification_compared_seconds{S,T}": "0x40 2000x40 5000x40",
    "pubsub_table_deleted_row_ratio{S,T}": "0.2x120",
}

_LOST: Final = 'pg_replication_slots_wal_status{S,slot_name="s",pg_replication_slots_wal_status="lost"}'
_UNRESERVED: Final = 'pg_replication_slots_wal_status{S,slot_name="s",pg_replication_slots_wal_status="unreserved"}'
_BAD: Final[Mapping[str, Mapping[str, str]]] = {
    "PubsubDown": {"up": "1x100 0x20"},
    "PubsubSubscriptionFails": {"pubsub_subscription_error{S}": "1x120"},
    "PubsubSubscriptionHasNoWorker": {"pubsub_subscription_workers{S}": "0x120"},
    "PubsubHeapFull": {"pubsub_jvm_heap_used_bytes": "950000000x120"},
    "PubsubPublisherAway": {"pubsub_publisher_up{S}": "0x120"},
    "PubsubUpstreamAway": {"pubsub_walsender_upstream_up": "0x120"},
    "PubsubSubscriptionLags": {"pg_stat_subscription_lag_seconds{S}": "301x120"},
    "PubsubSlotGrows": {'pg_replication_slots_retained_bytes{S,slot_name="s"}': "10000000001x120"},
    "PubsubSlotSoonLost": {'pg_replication_slots_safe_wal_size{S,slot_name="s"}': "999999999x120"},
    "PubsubSlotLostWithinTheHour": {'pg_replication_slots_safe_wal_size{S,slot_name="s"}': "20000000000-150000000x120"},
    "PubsubSlotLost": {_LOST: "0x110 1x10"},
    "PubsubTableStopped": {"pubsub_table_stopped{S,T}": "1x120"},
    "PubsubCopyStalls": {"pg_stat_progress_copy_tuples_processed{S,T}": "5000x120"},
    "PubsubConflicts": {"pg_stat_subscription_stats_confl_insert_exists_total{S}": "0x110 1x10"},
    "PubsubTableDiffers": {"pubsub_verification_equal{S,T}": "0x120"},
    "PubsubVerificationFails": {"pubsub_verification_failed{S,T}": "1x120"},
    "PubsubVerificationLate": {"pubsub_verification_compared_seconds{S,T}": "0x120"},
    "PubsubTableWorn": {"pubsub_table_deleted_row_ratio{S,T}": "0.6x120"},
}
_CASES: Final[list[tuple[Mapping[str, str], str | None]]] = [
    ({}, None),
    *((series, alert) for alert, series in _BAD.items()),
    ({_UNRESERVED: "1x120"}, "PubsubSlotLost"),
    # What is disabled fails nobody; what lasts a moment is not told.
    ({"pg_subscription_subenabled{S}": "0x120", "pubsub_subscription_workers{S}": "0x120"}, None),
    ({"pubsub_subscription_error{S}": "0x118 1x2"}, None),
    # What is verified by hand alone is never late.
    ({"pubsub_verification_compared_seconds{S,T}": "0x120", "pubsub_verification_interval_seconds": "_x120"}, None),
    ({"pg_stat_subscription_lag_seconds{S}": "2x115 900x5"}, None),
]


@pytest.fixture(scope="module")
def tool() -> Path:
    found = promtool.program()
    if found is None:
        pytest.skip("there is no promtool, and Debian's package cannot be fetched")
    return found


def run(tool: Path, *arguments: str) -> None:
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def labelled(series: str) -> str:
    common = 'job="pubsub",instance="n"'
    if "{" not in series:
        return f"{series}{{{common}}}"
    return series.replace("{S", f'{{{common},subname="s"').replace(",T", ',relation="public.t"')


def test_each_alert_fires_for_what_it_is_for_and_for_nothing_else(tool: Path, tmp_path: Path) -> None:
    assert set(re.findall(r"alert: (\w+)", RULES.read_text())) == set(_BAD)
    tests: list[dict[str, Any]] = []
    for changed, alert in _CASES:
        assert changed.keys() <= WELL.keys()
        fires = [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if alert else []
        tests.append(
            {
                "interval": "1m",
                "input_series": [
                    {"series": labelled(one), "values": values} for one, values in {**WELL, **changed}.items()
                ],
                "promql_expr_test": [
                    {
                        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                        "eval_time": "2h",
                        "exp_samples": fires,
                    }
                ],
            }
        )
    cases = tmp_path / "cases.yml"  # JSON is YAML
    cases.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    run(tool, "test", "rules", str(cases))


def test_prometheus_accepts_the_rules_and_the_dashboard_s_queries(tool: Path, tmp_path: Path) -> None:
    run(tool, "check", "rules", str(RULES))
    rules = [{"record": f"panel:{n}", "expr": query} for n, query in enumerate(queries())]
    assert len(rules) > 15
    file = tmp_path / "queries.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    run(tool, "check", "rules", str(file))


def test_prometheus_accepts_the_document_s_configuration(tool: Path, tmp_path: Path) -> None:
    text = (DEPLOY.parent / "docs" / "monitoring.md").read_text()
    match = re.search(r"(?m)^    rule_files:.*\n(?:    .*\n)+", text)
    assert match is not None
    (tmp_path / RULES.name).write_text(RULES.read_text())
    file = tmp_path / "prometheus.yml"
    file.write_text(re.sub(r"(?m)^    ", "", match[0]))
    run(tool, "check", "config", str(file))


def queries() -> list[str]:
    """Return the dashboard's queries, with values for its variables."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [one.replace("$__rate_interval", "5m").replace("$instance", "n").replace("$subname", "s") for one in found]


def test_every_metric_that_rules_and_dashboard_name_is_there() -> None:
    known = {
        sample.name
        for family in text_string_to_metric_families(exposition(partial(families, picture()), "")[1].decode())
        for sample in family.samples
    }
    # A family without samples is not in `known`; the picture has some of each.
    text = "\n".join([*re.findall(r"expr: (?:>-\n)?((?:.+\n)+?)(?= *(?:for|labels):)", RULES.read_text()), *queries()])
    named = set(_NAME.findall(text))
    assert len(named) > 25
    assert named <= known
    variables = json.loads(DASHBOARD.read_text())["templating"]["list"]
    assert all(set(_NAME.findall(json.dumps(one))) <= known for one in variables)


def test_every_metric_is_in_the_document() -> None:
    text = (DEPLOY.parent / "docs" / "monitoring.md").read_text()
    found = text_string_to_metric_families(exposition(partial(families, picture()), "")[1].decode())
    names = {one.name for one in found if not one.name.startswith(("process_", "python_"))}
    short = {one.removeprefix("pg_stat_subscription_stats_").removeprefix("debezium_metrics_") for one in names}
    missing = {
        one for one in short if f"`{one}`" not in text and f"`{one}_total`" not in text and f"`{one}_info`" not in text
    }
    assert {one for one in missing if not one.startswith("confl_")} == set()


def test_the_pods_of_kubernetes() -> None:
    """What a schema cannot see: settings that the program takes, its own ports, paths and user, and time to drain."""
    manifests = {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kubernetes" / "pubsub.yaml").read_text())}
    assert list(manifests) == ["ConfigMap", "Service", "PodDisruptionBudget", "StatefulSet"]
    settings = Settings.read(tomllib.loads(manifests["ConfigMap"]["data"]["pubsub.toml"]), Path("/var/lib/pubsub"))
    pod = manifests["StatefulSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (port,) = container["ports"]
    place = settings.http.place()
    assert place is not None
    assert port["containerPort"] == manifests["Service"]["spec"]["ports"][0]["port"] == place[1]
    endpoint = Endpoint(NodeSource(picture_of_nothing, 0.0))
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = container[probe]["httpGet"]
        assert (asked["path"] in endpoint._paths, asked["port"]) == (True, port["name"])
    image = (DEPLOY / "container" / "Containerfile").read_text()
    assert f"--uid {pod['securityContext']['runAsUser']} " in image
    assert pod["terminationGracePeriodSeconds"] > settings.drain_timeout
    assert container["args"] == ["daemon", "--standby"]
    assert settings.catalog.url is not None
    homes = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert f"PUBSUB_HOME={homes['home']} HOME={homes['home']}" in image
    for one in (container, *pod["initContainers"]):
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


async def picture_of_nothing() -> NoReturn:
    raise AssertionError
