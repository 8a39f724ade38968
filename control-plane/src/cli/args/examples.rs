//! Examples at the end of help pages.

pub(super) const EXAMPLES: &str = "\
Examples:
  Two model servers on this machine:
    switchpointd serve --endpoint 127.0.0.1:8000 --endpoint 127.0.0.1:8001

  A list that may change while running (names, labels; the format of llm-d's file-discovery):
    switchpointd serve --endpoints-file endpoints.yaml --snapshot-file state.json

      endpoints:
      - {name: gpu-0, address: 10.0.0.1, port: 8000}
      - {name: gpu-1, address: 10.0.0.2, port: 8000, labels: {llm-d.ai/engine-type: sglang}}

  See what it knows:
    curl -s 127.0.0.1:9090/debug/endpoints

  Check a configuration of llm-d's picker, and whether a model server reports the needed metrics:
    switchpointd check config.yaml
    switchpointd check --endpoint 10.0.0.1:8000

Every option is also an environment variable: --listen-admin is SWITCHPOINT_LISTEN_ADMIN.
";

pub(super) const MIGRATE_EXAMPLES: &str = "\
Examples:
  The values with which llm-d's release `llama` was installed:
    helm get values llama -n prod > llama.values.yaml
    switchpointd migrate -f llama.values.yaml --pool llama --namespace prod > values.yaml

  A running picker:
    kubectl get configmap,deployment,inferencepool,service -n prod -o yaml | switchpointd migrate -
    switchpointd migrate --cluster --namespace prod --pool llama --output-dir switchpoint/

  One configuration file:
    switchpointd migrate picker.yaml

stdout has the values of our chart, with the configuration of each pool; stderr has the report:

    - `router.epp.replicas` = `3` -> `daemon.replicas`: two daemons: one leads, one stands by; ...
    - `router.tracing.enabled` = `true`: spans have settings of their own here: ...

docs/how-to/migrate.md has the steps of a migration and a table of all items.
";

pub(super) const EXPLAIN_EXAMPLES: &str = "\
Examples:
    switchpointd explain --request body.json
    switchpointd explain --request body.json --without 10.0.0.1:8000 --config other.yaml
    jq -r 'select(.decision) | .decision' access.log | head -1 > decision.json
    switchpointd explain --request decision.json --format json
";
