//! Makes an Envoy config from a shipped config.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::{Result, root};

/// The name of the picker in `http_filters`.
const PICKER: &str = "switchpoint";

/// The runtime flag with which the metrics of a native module keep their names.
const METRIC_NAMES: &str = "envoy.reloadable_features.dynamic_modules_strip_custom_stat_prefix";

const ROUTES: &str = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/route_config/virtual_hosts/0/routes";

/// A shipped config to edit and run.
#[derive(Clone, Debug)]
pub struct EnvoyConfig(Value);

// === impl EnvoyConfig ===

impl EnvoyConfig {
    /// Reads a file of `envoy-config/`.
    ///
    /// # Errors
    /// Fails if the file does not exist or is not YAML.
    pub fn shipped(file: &str) -> Result<Self> {
        Self::read(&root().join("envoy-config").join(file))
    }

    /// Reads any config file, for example the file of a running Envoy, to start a second Envoy with
    /// the same config.
    ///
    /// # Errors
    /// Fails if the file does not exist or is not YAML.
    pub fn read(file: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(file)?;
        Ok(Self(
            serde_saphyr::from_str(&text)
                .map_err(|error| format!("{}: {error}", file.display()))?,
        ))
    }

    pub fn value(&mut self) -> &mut Value {
        &mut self.0
    }

    pub(super) fn text(&self) -> String {
        self.0.to_string()
    }

    /// Replaces every occurrence of a port number.
    ///
    /// # Errors
    /// Fails if the port does not occur, because then the file and the tests disagree about ports.
    pub fn replace_port(&mut self, from: u16, to: u16) -> Result<()> {
        let replaced = replace_port(&mut self.0, from, to);
        if replaced == 0 {
            Err(format!("the config has no port_value {from}").into())
        } else {
            Ok(())
        }
    }

    /// Sets keys of the picker's configuration.
    ///
    /// # Errors
    /// Fails if the config has no picker at the usual position.
    pub fn set_picker(&mut self, keys: &Map<String, Value>) -> Result<()> {
        let picker = self.picker()?;
        let place = if picker.pointer("/typed_config/filter_config").is_some() {
            "/typed_config/filter_config/value" // the native module
        } else {
            "/typed_config/config/configuration/value"
        };
        let text = picker
            .pointer_mut(place)
            .ok_or("the picker has no configuration")?;
        let mut configuration: Map<String, Value> =
            serde_json::from_str(text.as_str().ok_or("the configuration is no text")?)?;
        configuration.extend(keys.clone());
        *text = Value::String(Value::Object(configuration).to_string());
        Ok(())
    }

    /// Does what [`Self::set_picker`] does, if the daemon picks. Sets what the proxy sends to the
    /// daemon with each request, and ignores keys that are arguments of the daemon.
    ///
    /// # Errors
    /// Fails if the daemon has no such setting, or the config has no picker at the usual position.
    pub fn set_daemon(&mut self, key: &str, value: &Value) -> Result<()> {
        match key {
            "explain" | "objective_header" | "slo_headers" => Ok(()),
            "destination_format" => {
                let picker = self.picker()?;
                let metadata = picker
                    .pointer_mut("/typed_config/grpc_service/initial_metadata")
                    .and_then(Value::as_array_mut);
                let format = metadata
                    .into_iter()
                    .flatten()
                    .find(|pair| pair["key"] == "x-switchpoint-destination-format");
                *format.ok_or("the proxy sends no destination format")? =
                    json!({"key": "x-switchpoint-destination-format", "value": value});
                Ok(())
            }
            other => Err(format!("{other} cannot be set where the daemon picks").into()),
        }
    }

    /// Returns the filter that picks, or that calls the daemon.
    ///
    /// # Errors
    /// Fails if the filter is not at its usual position.
    pub fn picker(&mut self) -> Result<&mut Value> {
        let mut filters = self.filters()?.iter_mut();
        Ok(filters
            .find(|filter| filter["name"] == PICKER)
            .ok_or("no picker among the filters")?)
    }

    /// Sets the file of the picker's wasm module.
    ///
    /// # Errors
    /// Fails if the picker is not at its usual position.
    pub fn set_module(&mut self, file: &Path) -> Result<()> {
        let code = self
            .picker()?
            .pointer_mut("/typed_config/config/vm_config/code")
            .ok_or("the picker has no module")?;
        *code = json!({"local": {"filename": file}});
        Ok(())
    }

    /// Makes the edit that `native.yaml` describes: the native module picks in place of the wasm
    /// filter.
    ///
    /// # Errors
    /// Fails if the picker is not at its usual position.
    pub fn use_native_module(&mut self) -> Result<()> {
        let fragment = Self::shipped("native.yaml")?.0;
        *self.picker()? = fragment;
        self.filters()?
            .retain(|filter| filter["name"] != "header_to_metadata");
        let kept_names = json!({METRIC_NAMES: true});
        self.0["layered_runtime"] =
            json!({"layers": [{"name": "metrics", "static_layer": kept_names}]});
        Ok(())
    }

    /// Removes the picker and Envoy's admin port, and makes Envoy spread the requests over
    /// `servers` (`ADDRESS:PORT` each) by round robin.
    ///
    /// # Errors
    /// Fails if the structure of the config differs from the shipped configs.
    pub fn make_round_robin(&mut self, servers: &[String]) -> Result<()> {
        let hosts = servers
            .iter()
            .map(|server| host(server))
            .collect::<Result<Vec<Value>>>()?;
        self.filters()?
            .retain(|filter| filter["name"] != PICKER && filter["name"] != "header_to_metadata");
        let routes = self
            .0
            .pointer_mut(ROUTES)
            .and_then(Value::as_array_mut)
            .ok_or("the config has no routes")?;
        routes
            .iter_mut()
            .filter_map(Value::as_object_mut)
            .for_each(|route| drop(route.remove("typed_per_filter_config")));
        let clusters = self
            .0
            .pointer_mut("/static_resources/clusters")
            .and_then(Value::as_array_mut)
            .ok_or("the config has no clusters")?;
        clusters.truncate(1); // keeps the pool's cluster; the other clusters are for the picker
        let pool = clusters
            .first_mut()
            .and_then(Value::as_object_mut)
            .ok_or("the config has no cluster")?;
        pool.retain(|key, _| {
            !["type", "eds_cluster_config", "load_balancing_policy"].contains(&key.as_str())
        });
        pool.insert("type".into(), "STATIC".into());
        pool.insert("lb_policy".into(), "ROUND_ROBIN".into());
        pool.insert(
            "load_assignment".into(),
            json!({"cluster_name": "pool", "endpoints": [{"lb_endpoints": hosts}]}),
        );
        self.0
            .as_object_mut()
            .ok_or("the config is no object")?
            .remove("admin");
        Ok(())
    }

    /// Inserts a filter right before the picker, where a gateway would set the subset hint.
    ///
    /// # Errors
    /// Fails if the picker is not at its usual position.
    pub fn insert_before_picker(&mut self, filter: Value) -> Result<()> {
        let filters = self.filters()?;
        let at = filters
            .iter()
            .position(|filter| filter["name"] == PICKER)
            .ok_or("no picker among the filters")?;
        filters.insert(at, filter);
        Ok(())
    }

    /// Returns the HTTP filters of the listener, in order.
    fn filters(&mut self) -> Result<&mut Vec<Value>> {
        let path =
            "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/http_filters";
        Ok(self
            .0
            .pointer_mut(path)
            .and_then(Value::as_array_mut)
            .ok_or("the config has no HTTP filters")?)
    }
}

/// Returns the endpoint of a static cluster for `ADDRESS:PORT`.
///
/// # Errors
/// Fails if `server` has another form.
pub(crate) fn host(server: &str) -> Result<Value> {
    let (address, port) = server.rsplit_once(':').ok_or("a server is ADDRESS:PORT")?;
    Ok(
        json!({"endpoint": {"address": {"socket_address": {"address": address, "port_value": port.parse::<u16>()?}}}}),
    )
}

fn replace_port(value: &mut Value, from: u16, to: u16) -> usize {
    match value {
        Value::Object(fields) => {
            let ports = fields
                .iter_mut()
                .filter(|(key, value)| *key == "port_value" && **value == json!(from));
            let replaced = ports.map(|(_, value)| *value = json!(to)).count();
            replaced
                + fields
                    .values_mut()
                    .map(|value| replace_port(value, from, to))
                    .sum::<usize>()
        }
        Value::Array(values) => values
            .iter_mut()
            .map(|value| replace_port(value, from, to))
            .sum(),
        _ => 0,
    }
}

/// Returns a filter that copies the subset hint from request headers to dynamic metadata, as a
/// gateway would. `x-test-subset` becomes a string, and `x-test-subset-list` (comma-separated) a
/// list. An empty value becomes the empty list.
pub fn subset_hint_filter() -> Value {
    let script = r#"
        local function write(handle, value)
          handle:streamInfo():dynamicMetadata():set("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset", value)
        end
        function envoy_on_request(handle)
          local headers = handle:headers()
          local text, list = headers:get("x-test-subset"), headers:get("x-test-subset-list")
          if text then write(handle, text) end
          if list then
            local items = {}
            for item in string.gmatch(list, "[^,]+") do table.insert(items, item) end
            write(handle, items)
          end
          headers:remove("x-test-subset")
          headers:remove("x-test-subset-list")
        end"#;
    json!({
        "name": "test-subset-hint",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua",
            "default_source_code": {"inline_string": script},
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_asked_for_changes() {
        let shipped = EnvoyConfig::shipped("standalone.yaml").expect("the shipped file");
        let mut changed = shipped.clone();
        changed
            .replace_port(8080, 20_001)
            .expect("the listener's port");
        changed.replace_port(20_001, 8080).expect("the same port");
        assert_eq!(changed.0, shipped.0);
        assert!(
            changed.replace_port(1, 2).is_err(),
            "a port that is not there"
        );

        changed
            .set_picker(&Map::from_iter([("failure_mode".into(), json!("open"))]))
            .expect("the picker");
        let picker = changed
            .filters()
            .expect("filters")
            .iter()
            .find(|filter| filter["name"] == PICKER)
            .cloned()
            .expect("the picker");
        let text = picker
            .pointer("/typed_config/config/configuration/value")
            .and_then(Value::as_str)
            .expect("text")
            .to_owned();
        let configuration: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(configuration["failure_mode"], "open");
        assert_eq!(
            configuration["state"]["cluster"], "switchpoint-state",
            "what was shipped stays"
        );

        changed
            .insert_before_picker(subset_hint_filter())
            .expect("the picker");
        let names = changed
            .filters()
            .expect("filters")
            .iter()
            .map(|filter| filter["name"].as_str().unwrap_or("").to_owned());
        let names = names.collect::<Vec<_>>();
        let at = names
            .iter()
            .position(|name| name == "test-subset-hint")
            .expect("inserted");
        assert_eq!(names.get(at + 1).map(String::as_str), Some(PICKER));
    }

    #[test]
    fn round_robin_needs_neither_the_picker_nor_the_daemon() {
        let mut config = EnvoyConfig::shipped("standalone.yaml").expect("the shipped file");
        config
            .make_round_robin(&["127.0.0.1:1".into(), "127.0.0.1:2".into()])
            .expect("a shipped structure");
        let clusters = config
            .0
            .pointer("/static_resources/clusters")
            .and_then(Value::as_array)
            .cloned()
            .expect("clusters");
        assert_eq!(
            (clusters.len(), &clusters[0]["lb_policy"]),
            (1, &json!("ROUND_ROBIN"))
        );
        assert_eq!(
            clusters[0]["load_assignment"]["endpoints"][0]["lb_endpoints"]
                .as_array()
                .map(Vec::len),
            Some(2)
        );
        let text = config.0.to_string();
        let left = [
            "envoy.filters.http.wasm",
            "override_host",
            "switchpoint-state",
            "eds_config",
        ]
        .into_iter()
        .find(|part| text.contains(part));
        assert_eq!(left, None, "in {text}");
        assert!(config.make_round_robin(&["no port".into()]).is_err());
    }

    #[test]
    fn a_module_replaces_the_shipped_one() {
        let mut config = EnvoyConfig::shipped("standalone.yaml").expect("the shipped file");
        config
            .set_module(Path::new("/a/module.wasm"))
            .expect("the picker");
        assert!(config.0.to_string().contains("/a/module.wasm"));
        assert!(!config.0.to_string().contains("release/switchpoint.wasm"));
    }
}
