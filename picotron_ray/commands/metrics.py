"""``picotron-ray metrics``: the metrics that a run serves."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from picotron_ray.commands.output import table
from picotron_ray.launch import AsJson, reported


def metrics(
    grafana: Annotated[bool, typer.Option("--grafana", help="a dashboard for Grafana's import")] = False,
    rules: Annotated[
        bool, typer.Option("--rules", help="recording and alerting rules for Prometheus, as YAML")
    ] = False,
    kubernetes: Annotated[
        bool,
        typer.Option("--kubernetes", help="with --rules: as a PrometheusRule of the Prometheus operator"),
    ] = False,
    rule_tests: Annotated[
        str | None,
        typer.Option("--rule-tests", metavar="RULES", help="unit tests of the rules, which are in RULES"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print every metric that a run serves, or what is made of them for Grafana or Prometheus.

    Example: picotron-ray metrics --rules
    """
    if kubernetes and not rules:
        raise typer.BadParameter("--kubernetes says how --rules are printed; give both")
    if rules or rule_tests is not None or grafana:
        with reported(as_json):
            print(_made(grafana, rules, kubernetes, rule_tests, as_json))
        return None
    from picotron_ray.observability.catalogue import CATALOGUE

    rows = [
        {"metric": m.name, "kind": m.kind, "labels": list(m.all_labels), "of": m.server, "means": m.help}
        for m in CATALOGUE.values()
    ]
    return table(rows, as_json)


def _made(grafana: bool, rules: bool, kubernetes: bool, rule_tests: str | None, as_json: bool) -> str:
    """Return the one file that is asked for."""
    if grafana + rules + (rule_tests is not None) > 1:
        raise typer.BadParameter("give one of --grafana, --rules and --rule-tests")
    if grafana:
        from picotron_ray.observability.dashboard import dashboard

        return json.dumps(dashboard(), indent=None if as_json else 1)
    import yaml

    from picotron_ray.observability.alerts.prometheus_rules import kubernetes_rules, prometheus_rules
    from picotron_ray.observability.alerts.prometheus_tests import refuse_other_rules, tests_of_rules

    if rule_tests is not None:
        refuse_other_rules(rule_tests)
        found = tests_of_rules(rule_tests)
    else:
        found = kubernetes_rules() if kubernetes else prometheus_rules()
    return json.dumps(found) if as_json else yaml.safe_dump(found, sort_keys=False, width=100)
