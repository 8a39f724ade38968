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

pub(super) const EXPLAIN_EXAMPLES: &str = "\
Examples:
    switchpointd explain --request body.json
    switchpointd explain --request body.json --without 10.0.0.1:8000 --config other.yaml
    jq -r 'select(.decision) | .decision' access.log | head -1 > decision.json
    switchpointd explain --request decision.json --format json
";
