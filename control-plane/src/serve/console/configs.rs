//! Serves the text of each pool's configuration to the console, where a reader can edit the text
//! for a what-if question.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use crate::pool::writer::PoolView;
use crate::state::pool_views::PoolTable;

/// The default text for a pool without a configuration file.
const DEFAULT_TEXT: &str = "# This pool has no configuration file. This is the default.
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: marginal-cost-scorer
- type: max-score-picker
  parameters: {maxNumOfEndpoints: 3}
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: marginal-cost-scorer
  - pluginRef: max-score-picker
";

pub(super) async fn answer(State(pools): State<Arc<PoolTable>>) -> Json<Value> {
    let pools = pools.all();
    Json(json!({ "pools": pools.iter().map(row).collect::<Vec<_>>() }))
}

fn row(view: &PoolView) -> Value {
    let config = &view.sources.config;
    json!({ "name": &*view.name, "file": config.file.as_deref(), "text": config.text.as_deref().unwrap_or(DEFAULT_TEXT) })
}

#[cfg(test)]
mod tests {
    use scheduler::PipelineSpec;
    use scheduler::plugin::ParameterValue;

    use super::*;

    #[test]
    fn the_default_text_means_the_default_pipeline() {
        let (report, config) = crate::config::read(DEFAULT_TEXT);
        let mut pipeline = config
            .unwrap_or_else(|| panic!("{}", report.complaints("default")))
            .pipeline;
        let picker = pipeline.plugins.last_mut().unwrap();
        assert_eq!(
            picker.parameters,
            [("maxNumOfEndpoints".to_owned(), ParameterValue::Number(3.0))]
        );
        picker.parameters.clear();
        let default = PipelineSpec::default();
        assert_eq!(
            (pipeline.plugins, pipeline.profiles, default.ranked_max),
            (default.plugins, default.profiles, 3)
        );
    }
}
