//! Objectives, models and rewrites: which requests are shed, which models the pool serves and under
//! which names, and changes of the objects while requests run.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use testbed::client::ClientReply;
use testbed::load::LoadGenerator;
use testbed::model_server::{self, MetricOverrides};
use testbed::stack::{Stack, StackBuilder};
use testbed::{Result, wait_for};

use crate::echo;
use crate::pools::TwoPools;

/// The maximum wait for a change without a promised time.
const LIMIT: Duration = Duration::from_secs(30);

/// The names of the objective header, the older name last.
const OBJECTIVE: [&str; 2] = [
    "x-llm-d-inference-objective",
    "x-gateway-inference-objective",
];

const PATHS: [&str; 2] = ["/v1/chat/completions", "/v1/messages"];

/// The objectives of the pool `default`, with negative, zero and positive priorities.
const OBJECTIVES: [(&str, i32); 4] = [
    ("batch", -1),
    ("scavenger", -10),
    ("normal", 0),
    ("urgent", 10),
];

struct ObjectsFolder(TempDir);

impl ObjectsFolder {
    fn with(objects: &[Value]) -> Result<Self> {
        let folder = Self(tempfile::tempdir()?);
        folder.write("objects.yaml", &text(objects))?;
        Ok(folder)
    }

    fn write(&self, name: &str, text: &str) -> Result<()> {
        let draft = self.0.path().join("draft");
        std::fs::write(&draft, text)?;
        Ok(std::fs::rename(draft, self.0.path().join(name))?)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Returns a builder whose daemon watches the folder.
    fn follow(&self, builder: StackBuilder) -> StackBuilder {
        builder.daemon_arguments(&["--objects", &self.path().display().to_string()])
    }
}

fn text(objects: &[Value]) -> String {
    objects
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join("\n---\n")
}

fn objective(name: &str, pool: &str, priority: i32) -> Value {
    json!({"apiVersion": "llm-d.ai/v1alpha2", "kind": "InferenceObjective", "metadata": {"name": name}, "spec": {"priority": priority, "poolRef": {"name": pool}}})
}

fn objectives() -> Vec<Value> {
    OBJECTIVES
        .iter()
        .map(|(name, priority)| objective(name, "default", *priority))
        .collect()
}

fn model(name: &str, pool: &str, criticality: &str, targets: &[(&str, u32)]) -> Value {
    let targets: Vec<Value> = targets
        .iter()
        .map(|(name, weight)| json!({"name": name, "weight": weight}))
        .collect();
    json!({"apiVersion": "inference.networking.x-k8s.io/v1alpha2", "kind": "InferenceModel", "metadata": {"name": name},
           "spec": {"modelName": name, "criticality": criticality, "targetModels": targets, "poolRef": {"name": pool}}})
}

fn full() -> MetricOverrides {
    MetricOverrides::from([("num_requests_waiting".to_owned(), "50".to_owned())])
}

/// Makes every engine report a long queue. Waits until the picker knows the queues, which is when
/// `shed` is refused.
async fn saturate(
    stack: &Stack,
    shed: impl AsyncFn() -> Result<ClientReply>,
) -> Result<ClientReply> {
    stack
        .servers
        .iter()
        .for_each(|server| server.override_metrics(full()));
    let refused = || async { shed().await.ok().filter(|reply| reply.status != 200) };
    wait_for(
        LIMIT,
        "the picker to know that its pool is saturated",
        refused,
    )
    .await
}

async fn chat_as(
    stack: &Stack,
    path: &str,
    headers: &[(&str, &str)],
    model: &str,
) -> Result<ClientReply> {
    let body = json!({"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]});
    stack
        .send(echo::post(path, headers, body.to_string())?)
        .await
}

fn assert_shed(reply: &ClientReply, path: &str) -> Result<()> {
    assert_eq!(reply.status, 429, "{path}: {}", reply.text());
    assert_eq!(
        reply.header("x-llm-d-request-dropped-reason"),
        "rejected-saturated"
    );
    assert_eq!(reply.header("retry-after"), "1");
    let body = reply.json()?;
    assert_eq!(body["error"]["type"], "rate_limit_error", "{body}");
    match path {
        "/v1/messages" => {
            assert_eq!(
                (&body["type"], &body["error"]["code"]),
                (&json!("error"), &Value::Null),
                "Anthropic's format: {body}"
            );
        }
        _ => assert_eq!(
            (&body["type"], &body["error"]["code"]),
            (&Value::Null, &json!("saturated")),
            "OpenAI's format: {body}"
        ),
    }
    Ok(())
}

#[tokio::test]
async fn a_sheddable_request_is_429_when_the_pool_is_saturated() -> Result<()> {
    let folder = ObjectsFolder::with(&objectives())?;
    let mut stack = folder
        .follow(
            Stack::builder()
                .servers(2)
                .picker(json!({"objective_header": "trust"})),
        )
        .shared_envoy()
        .start()
        .await?;
    for (name, _) in OBJECTIVES {
        let reply = chat_as(&stack, PATHS[0], &[(OBJECTIVE[0], name)], "demo").await?;
        assert_eq!(
            reply.status,
            200,
            "{name} is served while the pool has room: {}",
            reply.text()
        );
    }
    let first = saturate(&stack, async || {
        chat_as(&stack, PATHS[0], &[(OBJECTIVE[0], "batch")], "demo").await
    })
    .await?;
    assert_shed(&first, PATHS[0])?;
    for path in PATHS {
        for (name, priority) in OBJECTIVES {
            for header in OBJECTIVE {
                let reply = chat_as(&stack, path, &[(header, name)], "demo").await?;
                match priority {
                    ..0 => assert_shed(&reply, path)?,
                    _ => assert_eq!(reply.status, 200, "{path} {name}: {}", reply.text()),
                }
            }
        }
        let both = chat_as(
            &stack,
            path,
            &[(OBJECTIVE[1], "batch"), (OBJECTIVE[0], "normal")],
            "demo",
        )
        .await?;
        assert_eq!(both.status, 200, "the current header name has precedence");
        for headers in [&[][..], &[(OBJECTIVE[0], "nobody's")]] {
            assert_eq!(
                chat_as(&stack, path, headers, "demo").await?.status,
                200,
                "requests without a known objective are served: {headers:?}"
            );
        }
    }
    let bodyless = stack
        .send(echo::get("/v1/models", &[(OBJECTIVE[0], "batch")])?)
        .await?;
    assert_shed(&bodyless, "/v1/models")?;

    stack
        .servers
        .iter()
        .for_each(|server| server.override_metrics(MetricOverrides::new()));
    let served = || async {
        (chat_as(&stack, PATHS[0], &[(OBJECTIVE[0], "batch")], "demo")
            .await
            .ok()?
            .status
            == 200)
            .then_some(())
    };
    wait_for(LIMIT, "the picker to know that there is room again", served).await?;
    let daemon = stack.daemon()?;
    let counted = || async {
        let page = daemon.admin("/metrics").await.ok()?.text();
        let counted = |parts: &[&str]| {
            page.lines()
                .any(|line| parts.iter().all(|part| line.contains(part)) && !line.ends_with(" 0"))
        };
        (counted(&["rejected-saturated"])
            && counted(&[
                "llm_d_epp_request_total",
                "model_name=\"demo\"",
                "priority=\"10\"",
            ]))
        .then_some(())
    };
    wait_for(LIMIT, "the shed requests to be counted", counted).await
}

#[tokio::test]
async fn a_client_does_not_choose_its_priority_unless_it_is_trusted() -> Result<()> {
    let mut objects = objectives();
    objects.extend([
        model("demo", "default", "Standard", &[]),
        model("lazy", "default", "Sheddable", &[("demo", 1)]),
    ]);
    let folder = ObjectsFolder::with(&objects)?;
    let stack = folder
        .follow(Stack::builder().servers(2))
        .shared_envoy()
        .start()
        .await?;
    let first = saturate(&stack, async || {
        chat_as(&stack, PATHS[0], &[], "lazy").await
    })
    .await?;
    assert_shed(&first, PATHS[0])?;
    for header in OBJECTIVE {
        let reply = chat_as(&stack, PATHS[0], &[(header, "urgent")], "lazy").await?;
        assert_shed(&reply, PATHS[0])?;
        let reply = chat_as(&stack, PATHS[0], &[(header, "batch")], "demo").await?;
        assert_eq!(
            reply.status,
            200,
            "the model's criticality decides: {}",
            reply.text()
        );
        assert!(
            echo::header(&reply.json()?, header).is_empty(),
            "the engine does not receive the client's objective"
        );
    }
    Ok(())
}

/// Returns the filter that `docs/how-to/envoy.md` puts before the picker to give all clients the
/// same objective.
fn objective_for_all(objective: &str) -> Value {
    json!({
        "name": "envoy.filters.http.header_mutation",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation",
            "mutations": {"request_mutations": [
                {"remove": OBJECTIVE[1]},
                {"append": {"header": {"key": OBJECTIVE[0], "value": objective}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}},
            ]},
        },
    })
}

#[tokio::test]
async fn what_stands_before_the_picker_chooses_for_clients() -> Result<()> {
    let folder = ObjectsFolder::with(&objectives())?;
    let builder = Stack::builder()
        .servers(2)
        .picker(json!({"objective_header": "trust"}))
        .filter_before_picker(objective_for_all("batch"));
    let stack = folder.follow(builder).shared_envoy().start().await?;
    let first = saturate(&stack, async || {
        chat_as(&stack, PATHS[0], &[], "demo").await
    })
    .await?;
    assert_shed(&first, PATHS[0])?;
    for header in OBJECTIVE {
        let urgent = [(header, "urgent"), (header, "urgent")];
        assert_shed(&chat_as(&stack, PATHS[1], &urgent, "demo").await?, PATHS[1])?;
    }
    Ok(())
}

#[tokio::test]
async fn a_model_that_the_pool_does_not_serve_is_404() -> Result<()> {
    let folder = ObjectsFolder::with(&[
        model("demo", "default", "Critical", &[]),
        model("elsewhere", "another-pool", "Critical", &[]),
    ])?;
    let stack = folder
        .follow(Stack::builder().servers(1))
        .shared_envoy()
        .start()
        .await?;
    for (path, name) in PATHS
        .iter()
        .flat_map(|path| ["elsewhere", "Demo", "demo ", "gpt-\"9\""].map(|name| (*path, name)))
    {
        let reply = chat_as(&stack, path, &[], name).await?;
        let body = reply.json()?;
        assert_eq!(
            (reply.status, reply.header("x-llm-d-request-dropped-reason")),
            (404, "unknown-model"),
            "{path} {name}: {body}"
        );
        let expected = match path {
            "/v1/messages" => ("not_found_error", &Value::Null),
            _ => ("invalid_request_error", &json!("model_not_found")),
        };
        assert_eq!(
            (
                body["error"]["type"].as_str().unwrap_or_default(),
                &body["error"]["code"]
            ),
            expected,
            "{body}"
        );
        assert_eq!(body["type"] == "error", path == "/v1/messages", "{body}");
    }
    for path in PATHS {
        assert_eq!(
            chat_as(&stack, path, &[], "demo").await?.status,
            200,
            "{path}"
        );
        let asked = chat_as(
            &stack,
            path,
            &[("x-llm-d-model-name-rewrite", "elsewhere")],
            "demo",
        )
        .await?;
        assert_eq!(
            asked.status, 404,
            "a rewrite header gives access to no further models"
        );
    }
    assert_eq!(
        stack.send(echo::get("/v1/models", &[])?).await?.status,
        200,
        "a request that names no model needs none"
    );
    Ok(())
}

#[tokio::test]
async fn strict_pools_need_no_models_to_refuse_others() -> Result<()> {
    let rewrite = json!({"apiVersion": "llm-d.ai/v1alpha2", "kind": "InferenceModelRewrite", "metadata": {"name": "r"}, "spec": {
        "poolRef": {"name": "default"}, "rules": [{"matches": [{"model": {"value": "alias"}}], "targets": [{"modelRewrite": "demo"}]}]}});
    let folder = ObjectsFolder::with(&[rewrite])?;
    let stack = folder
        .follow(
            Stack::builder()
                .servers(1)
                .daemon_arguments(&["--strict-models"]),
        )
        .shared_envoy()
        .start()
        .await?;
    assert_eq!(chat_as(&stack, PATHS[0], &[], "demo").await?.status, 404);
    let reply = chat_as(&stack, PATHS[0], &[], "alias").await?;
    assert_eq!(
        (reply.status, asked_for(&reply)?.as_str()),
        (200, "demo"),
        "{}",
        reply.text()
    );
    Ok(())
}

/// Returns the model in the body that the engine received, from an echo.
fn asked_for(reply: &ClientReply) -> Result<String> {
    let echo = reply.json()?;
    let body: Value = serde_json::from_str(echo["body"].as_str().ok_or("no body in the echo")?)?;
    Ok(body["model"].as_str().ok_or("no model")?.to_owned())
}

#[tokio::test]
async fn targets_are_drawn_by_weight_on_every_worker() -> Result<()> {
    let rewrite = |name: &str, from: Option<&str>, targets: Value| {
        let matches = from
            .map(|from| json!([{"model": {"type": "Exact", "value": from}}]))
            .unwrap_or(json!([]));
        json!({"apiVersion": "llm-d.ai/v1alpha2", "kind": "InferenceModelRewrite", "metadata": {"name": name},
               "spec": {"poolRef": {"name": "default"}, "rules": [{"matches": matches, "targets": targets}]}})
    };
    let folder = ObjectsFolder::with(&[
        rewrite("all", None, json!([{"modelRewrite": "demo"}])),
        rewrite(
            "canary",
            Some("chat"),
            json!([{"modelRewrite": "new", "weight": 10}, {"modelRewrite": "old", "weight": 30}]),
        ),
        rewrite("late", Some("chat"), json!([{"modelRewrite": "never"}])),
    ])?;
    let options = model_server::ModelServerOptions {
        models: vec!["new".into(), "old".into(), "demo".into()],
        speed: 0.0,
        ..Default::default()
    };
    let stack = folder
        .follow(Stack::builder().servers_like(2, &options).concurrency(2))
        .shared_envoy()
        .start()
        .await?;
    let mut shares: BTreeMap<String, u32> = BTreeMap::new();
    for _ in 0..400 {
        *shares
            .entry(asked_for(&chat_as(&stack, PATHS[0], &[], "chat").await?)?)
            .or_default() += 1;
    }
    // The expected number is 100, with a standard deviation of 9. The bounds are six deviations
    // away.
    assert!(
        shares.keys().eq(["new", "old"]) && (48..=152).contains(&shares["new"]),
        "{shares:?}"
    );
    assert_eq!(
        asked_for(&chat_as(&stack, PATHS[0], &[], "anything").await?)?,
        "demo",
        "a rule without matches applies to all other models"
    );
    let body = json!({"model": "chat", "prompt": "hi", "max_tokens": 2});
    let reply = stack.post("/v1/completions", &body).await?.json()?;
    assert_eq!(
        reply["model"], "chat",
        "the client gets the name it used: {reply}"
    );
    Ok(())
}

#[tokio::test]
async fn objects_change_while_requests_run() -> Result<()> {
    let folder = ObjectsFolder::with(&[model("demo", "default", "Standard", &[])])?;
    let mut stack = folder
        .follow(Stack::builder().servers(2).concurrency(4))
        .shared_envoy()
        .start()
        .await?;
    let load = LoadGenerator::start(stack.address(), 4);
    let status = async |name: &str| {
        chat_as(&stack, PATHS[0], &[], name)
            .await
            .map(|reply| reply.status)
    };
    assert_eq!(status("second").await?, 404);
    let is = |name: &'static str, wanted: u16| {
        let status = &status;
        // Each request uses a separate connection, so that every worker gets requests.
        move || async move {
            for _ in 0..8 {
                (status(name).await.ok()? == wanted).then_some(())?;
            }
            Some(())
        }
    };
    folder.write(
        "second.yaml",
        &model("second", "default", "Critical", &[("demo", 1)]).to_string(),
    )?;
    wait_for(LIMIT, "the new model to be served", is("second", 200)).await?;
    let debug = async || {
        Ok::<Value, testbed::Error>(
            stack
                .daemon
                .as_ref()
                .ok_or("no daemon")?
                .admin("/debug/config")
                .await?
                .json()?["pools"][0]["objects"]
                .clone(),
        )
    };
    let good = debug().await?;
    assert_eq!(
        (good["models"].as_array().map(Vec::len), &good["error"]),
        (Some(2), &Value::Null),
        "{good}"
    );

    folder.write(
        "second.yaml",
        "apiVersion: llm-d.ai/v1alpha2\nkind: InferenceModle\n",
    )?;
    let reported = || async {
        let objects = debug().await.ok()?;
        objects["error"]["message"]
            .as_str()?
            .contains("second.yaml:2: kind: unknown kind \"InferenceModle\"; did you mean")
            .then_some(objects)
    };
    let bad = wait_for(LIMIT, "a bad file to be reported", reported).await?;
    assert_eq!(bad["models"], good["models"], "the last good objects stay");
    for _ in 0..8 {
        assert_eq!(status("second").await?, 200);
    }
    std::fs::remove_file(folder.path().join("second.yaml"))?;
    wait_for(LIMIT, "the removed model to be refused", is("second", 404)).await?;
    assert_eq!(debug().await?["error"], Value::Null);
    load.stop().await?.check_all_served()?;
    let daemon = stack.daemon()?;
    assert!(
        daemon
            .process()
            .stderr()
            .contains("objects cannot be used; the last good ones stay"),
        "the daemon's log"
    );
    assert!(
        daemon
            .admin("/metrics")
            .await?
            .text()
            .contains("switchpoint_source_ok{pool=\"default\",source=\"objects\"} 1")
    );
    Ok(())
}

#[tokio::test]
async fn the_objects_of_a_pool_are_no_other_pools() -> Result<()> {
    let folder = ObjectsFolder::with(&[
        model("demo", "qwen", "Standard", &[]),
        model("other", "qwen", "Critical", &[("demo", 1)]),
    ])?;
    let two = TwoPools::start(|builder| folder.follow(builder).shared_envoy()).await?;
    let ask = async |to: &str, name: &str| {
        let body = json!({"model": name, "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]});
        two.stack
            .send(echo::post(PATHS[0], &[("x-to", to)], body.to_string())?)
            .await
    };
    for round in 0..5 {
        let reply = ask("qwen", "other").await?;
        assert_eq!(
            (reply.status, asked_for(&reply)?.as_str()),
            (200, "demo"),
            "{round}"
        );
        assert_eq!(
            ask("qwen", "unheard-of").await?.status,
            404,
            "{round}: this pool has a list of models"
        );
        for name in ["other", "unheard-of"] {
            let reply = ask("default", name).await?;
            assert_eq!(
                (reply.status, asked_for(&reply)?.as_str()),
                (200, name),
                "{round}: this pool has no objects"
            );
        }
    }
    Ok(())
}
