//! The picker's configuration changes while requests run, through Envoy's extension config
//! discovery (ECDS) from a file.

use std::path::{Path, PathBuf};
use std::time::Duration;

use e2e::ledger_metrics;
use http::Request;
use serde_json::{Value, json};
use tempfile::TempDir;
use testbed::client::{self, EventStream};
use testbed::load::LoadGenerator;
use testbed::model_server::ModelServerOptions;
use testbed::stack::{Stack, StackBuilder};
use testbed::{Result, wait_for};

const LIMIT: Duration = Duration::from_secs(30);

/// The filter's configuration in a separate file that Envoy watches.
struct WatchedConfig {
    file: PathBuf,
    _folder: TempDir,
}

impl WatchedConfig {
    fn new() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        Ok(Self {
            file: folder.path().join("picker.json"),
            _folder: folder,
        })
    }

    /// Moves the shipped filter's configuration from the listener into the file.
    fn follow(&self, builder: StackBuilder) -> StackBuilder {
        let file = self.file.clone();
        builder.envoy_config(move |config| {
            let path = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/http_filters";
            let filters = config.pointer_mut(path).and_then(Value::as_array_mut).expect("filters");
            let picker = filters.iter_mut().find(|filter| filter["name"] == "switchpoint").expect("the picker");
            write(&file, &picker["typed_config"]).expect("a file");
            *picker = json!({
                "name": "switchpoint",
                "config_discovery": {
                    "config_source": {"resource_api_version": "V3", "path_config_source": {"path": file}},
                    "type_urls": ["type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm"],
                },
            });
        })
    }

    /// Sets keys of the picker's configuration. Replaces the file by renaming, as tools of
    /// operators do.
    fn set(&self, keys: &Value) -> Result<()> {
        let response: Value = serde_json::from_slice(&std::fs::read(&self.file)?)?;
        let mut typed = response["resources"][0]["typed_config"].clone();
        let text = typed
            .pointer_mut("/config/configuration/value")
            .ok_or("no configuration")?;
        let mut picker: Value = serde_json::from_str(text.as_str().ok_or("no text")?)?;
        for (key, value) in keys.as_object().into_iter().flatten() {
            picker[key] = value.clone();
        }
        *text = json!(picker.to_string());
        write(&self.file, &typed)
    }
}

fn write(file: &Path, typed_config: &Value) -> Result<()> {
    let draft = file.with_extension("draft");
    let resource = json!({"@type": "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig", "name": "switchpoint", "typed_config": typed_config});
    std::fs::write(&draft, json!({"resources": [resource]}).to_string())?;
    Ok(std::fs::rename(draft, file)?)
}

async fn in_force(stack: &Stack, ready_path: &str) -> Result<()> {
    let ready = || async {
        (stack.get(ready_path).await.ok()?.text() == r#"{"ready":true}"#).then_some(())
    };
    wait_for(LIMIT, &format!("{ready_path} to be the ready path"), ready).await
}

#[tokio::test]
async fn a_new_configuration_takes_force_and_no_request_is_lost() -> Result<()> {
    let followed = WatchedConfig::new()?;
    let slow = ModelServerOptions {
        models: vec!["demo".into()],
        speed: 0.0,
        chunk_delay_ms: 50,
        ..ModelServerOptions::default()
    };
    let stack = followed
        .follow(Stack::builder().servers_like(3, &slow).concurrency(2))
        .start()
        .await?;
    let chat = json!({"model": "demo", "stream": true, "max_tokens": 60, "ignore_eos": true, "messages": [{"role": "user", "content": "long"}]});
    let request = Request::post("/v1/chat/completions").body(client::full(chat.to_string()))?;
    let mut stream = EventStream::new(client::start(stack.address(), request).await?);
    stream.next().await?.ok_or("the stream begins")?;

    let load = LoadGenerator::start(stack.address(), 6);
    load.wait_for_more(50, LIMIT).await?;
    // A worker that became ready later may have parked some requests.
    let parked = stack.envoy.picker_stat("switchpoint_parked_total").await?;
    for round in 0..8 {
        let path = format!("/v1/models/ready-{round}");
        followed.set(&json!({"ready_path": path}))?;
        in_force(&stack, &path).await?;
        load.wait_for_more(20, LIMIT).await?;
    }
    let events = stream.rest().await?;
    assert_eq!(
        events.last().map(|event| event.data.as_str()),
        Some("[DONE]"),
        "the stream that ran during the first update ended normally"
    );
    load.stop().await?.check_all_served()?;
    assert_eq!(
        stack.envoy.picker_stat("switchpoint_parked_total").await?,
        parked,
        "no request waited: the state belongs to the VM and outlives a configuration"
    );
    assert_eq!(
        stack
            .envoy
            .picker_stat("switchpoint_state_connected")
            .await?,
        1
    );
    Ok(())
}

#[tokio::test]
async fn a_storm_of_updates_is_weathered() -> Result<()> {
    let followed = WatchedConfig::new()?;
    let stack = followed
        .follow(Stack::builder().servers(2).concurrency(2))
        .start()
        .await?;
    let load = LoadGenerator::start(stack.address(), 4);
    let taken = || async {
        let stats = stack
            .envoy
            .stats("extension_config_discovery\\..*config_reload$")
            .await?;
        Ok::<_, testbed::Error>(stats.values().sum::<i64>())
    };
    for round in 0..100 {
        let before = taken().await?;
        followed.set(&json!({"ready_path": format!("/v1/models/ready-{round}")}))?;
        wait_for(LIMIT, "Envoy to take the configuration", || async {
            taken().await.ok().filter(|now| *now > before)
        })
        .await?;
    }
    in_force(&stack, "/v1/models/ready-99").await?;
    load.wait_for_more(50, LIMIT).await?;
    ledger_metrics::close("ECDS configuration changed 100 times", load, &stack).await?;
    stack
        .envoy
        .picker_stat_until(
            "switchpoint_state_connected",
            |connected| connected == 1,
            LIMIT,
        )
        .await?;
    Ok(())
}

#[tokio::test]
async fn a_bad_configuration_is_refused_by_name_and_the_old_one_serves() -> Result<()> {
    let followed = WatchedConfig::new()?;
    let mut stack = followed.follow(Stack::builder().servers(2)).start().await?;
    let load = LoadGenerator::start(stack.address(), 2);
    let drills = [
        (json!({"cold_start_wait_ms": -1}), "cold_start_wait_ms"),
        (
            json!({"cold_start_wait_ms": 2_000, "destination_format": "both"}),
            "destination_format",
        ),
        (
            json!({"destination_format": "list", "colour": "blue"}),
            "colour",
        ),
        (json!({"pools": []}), "pools"),
    ];
    let good = std::fs::read(&followed.file)?;
    for (keys, field) in drills {
        let rejected = || async {
            let stats = stack
                .envoy
                .stats("extension_config_discovery\\..*(config_fail|update_rejected)$")
                .await?;
            Ok::<_, testbed::Error>(stats.values().sum::<i64>())
        };
        let before = rejected().await?;
        std::fs::write(&followed.file, &good)?;
        followed.set(&keys)?;
        wait_for(LIMIT, &format!("a refusal of {field}"), || async {
            rejected().await.ok().filter(|now| *now > before)
        })
        .await?;
        let log = stack.envoy.process().stderr();
        assert!(
            log.lines()
                .any(|line| line.contains("configuration refused") && line.contains(field)),
            "the log names {field}"
        );
        in_force(&stack, "/switchpoint/ready").await?;
    }
    followed.set(&json!({"pools": [{"name": "default", "clusters": ["inference-pool"]}], "ready_path": "/v1/models/mended"}))?;
    in_force(&stack, "/v1/models/mended").await?;
    load.stop().await?.check_all_served()
}

#[tokio::test]
async fn envoy_does_not_start_on_a_bad_configuration_and_says_which_field() -> Result<()> {
    let refused = Stack::builder()
        .picker(json!({"cold_start_wait_ms": "two seconds"}))
        .quiet()
        .start()
        .await;
    let why = refused.err().ok_or("it started")?.to_string();
    assert!(
        why.contains("configuration refused: `cold_start_wait_ms`"),
        "{why}"
    );
    Ok(())
}
