//! Explanations of decisions: in replies to clients that may request them, in the access log, and
//! in replays by the daemon.

use std::path::{Path, PathBuf};
use std::time::Duration;

use http::Request;
use serde_json::{Value, json};
use testbed::stack::Stack;
use testbed::{Result, client, daemon};
use tokio::process::Command;

const LIMIT: Duration = Duration::from_secs(10);

/// Starts a stack that records every decision.
async fn recorded(servers: usize) -> Result<Stack> {
    Stack::builder()
        .servers(servers)
        .picker(json!({"decision_log_one_in": 1, "explain": true}))
        .shared_envoy()
        .start()
        .await
}

fn chat(stack: &Stack, prompt: &str, id: &str) -> Result<Request<client::Body>> {
    let body = json!({"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": prompt}]});
    let request = Request::post(format!("http://{}/v1/chat/completions", stack.address()))
        .header("x-request-id", id);
    Ok(request
        .header("content-type", "application/json")
        .body(client::full(body.to_string()))?)
}

/// Runs `switchpointd explain`. Returns the printed text as `Ok`, or the error text as `Err`.
async fn explain(
    stack: &mut Stack,
    file: &Path,
    more: &[&str],
) -> Result<std::result::Result<String, String>> {
    let admin = stack.daemon()?.settings().admin.address().to_string();
    let mut command = Command::new(daemon::binary()?);
    command
        .args(["explain", "--admin", &admin, "--request"])
        .arg(file)
        .args(more);
    let output = command.output().await?;
    let out = String::from_utf8(output.stdout)?;
    let err = String::from_utf8(output.stderr)?;
    Ok(if output.status.success() {
        Ok(out)
    } else {
        Err(err)
    })
}

async fn explained(stack: &mut Stack, file: &Path, more: &[&str]) -> Result<Value> {
    let printed = explain(stack, file, &[more, &["--format", "json"]].concat()).await??;
    Ok(serde_json::from_str(&printed)?)
}

fn written(stack: &Stack, name: &str, text: &str) -> Result<PathBuf> {
    let file = stack.folder().join(name);
    std::fs::write(&file, text)?;
    Ok(file)
}

#[tokio::test]
async fn a_logged_decision_made_again_gives_the_same_list() -> Result<()> {
    let mut stack = recorded(4).await?;
    for number in 0..6 {
        // The test sends each prompt twice, so that some decisions use a cached prefix.
        let prompt = format!("{} a story ", number / 2).repeat(200);
        let id = format!("explain-{number}");
        let reply = stack.send(chat(&stack, &prompt, &id)?).await?;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let line = stack.envoy.access_log_of(&id, LIMIT).await?;
        let record = line["decision"]
            .as_str()
            .ok_or_else(|| format!("no decision in {line}"))?;
        assert!(
            !record.contains("a story"),
            "prompts must not be logged: {record}"
        );
        let file = written(&stack, &format!("{id}.json"), record)?;
        let answer = explained(&mut stack, &file, &[]).await?;
        let destination: Vec<&str> = line["destination"]
            .as_str()
            .unwrap_or_default()
            .split(',')
            .collect();
        let cached = &answer["candidates"]
            .as_array()
            .ok_or("no candidates")?
            .iter()
            .map(|c| c["predicted"]["cached_tokens"].as_u64())
            .max();
        assert_eq!(
            cached.flatten() > Some(0),
            number % 2 == 1,
            "only the second request of each prompt finds a cached prefix: {answer}"
        );
        assert_eq!(
            (&answer["picked"], &answer["was_picked"]),
            (&json!(destination), &json!(destination)),
            "{answer}"
        );
        let without = explained(&mut stack, &file, &["--without", destination[0]]).await?;
        assert_ne!(without["picked"][0], destination[0]);
    }
    Ok(())
}

#[tokio::test]
async fn a_request_is_explained_by_the_live_state_and_by_what_might_be() -> Result<()> {
    let mut stack = recorded(3).await?;
    let body = json!({"model": "demo", "prompt": "hello"}).to_string();
    let file = written(&stack, "body.json", &body)?;
    let path = ["--path", "/v1/completions"];
    let answer = explained(&mut stack, &file, &path).await?;
    assert_eq!(answer["pool"], "default");
    let candidates = answer["candidates"].as_array().ok_or("no candidates")?;
    assert_eq!(candidates.len(), 3, "{answer}");
    assert!(
        candidates.iter().all(
            |row| row["scores"]["marginal-cost-scorer"].is_number() && row["total"].is_number()
        ),
        "{answer}"
    );
    let first = answer["picked"][0]
        .as_str()
        .ok_or("no endpoint picked")?
        .to_owned();

    let hinted = explained(
        &mut stack,
        &file,
        &[&path[..], &["--subset", &first]].concat(),
    )
    .await?;
    assert_eq!(hinted["picked"], json!([first]));
    let dropped = |row: &&Value| row["dropped_by"] == "subset";
    assert_eq!(
        hinted["candidates"]
            .as_array()
            .ok_or("no candidates")?
            .iter()
            .filter(dropped)
            .count(),
        2,
        "{hinted}"
    );

    let other = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n- type: random-picker\n  parameters: {maxNumOfEndpoints: 1}\n";
    let config = written(&stack, "other.yaml", other)?;
    let config = config.to_str().ok_or("a path in UTF-8")?;
    let random = explained(
        &mut stack,
        &file,
        &[&path[..], &["--config", config]].concat(),
    )
    .await?;
    assert_eq!(random["picked"].as_array().map(Vec::len), Some(1));
    assert_eq!(
        random["candidates"][0]["scores"],
        json!({}),
        "this configuration has no scorer: {random}"
    );

    let table = explain(&mut stack, &file, &path).await??;
    assert!(
        table.starts_with("picked: ")
            && table.contains("marginal-cost-scorer")
            && table.contains(&first),
        "{table}"
    );
    Ok(())
}

#[tokio::test]
async fn questions_that_cannot_be_answered_say_why() -> Result<()> {
    let mut stack = recorded(1).await?;
    let file = written(&stack, "body.json", r#"{"prompt": "no model"}"#)?;
    let answer = explained(&mut stack, &file, &["--path", "/v1/completions"]).await?;
    assert_eq!(
        (
            &answer["reply"]["status"],
            answer["reply"]["body"]["error"]["code"].as_str()
        ),
        (&json!(400), Some("missing_model"))
    );
    let refusal = explain(&mut stack, &file, &["--pool", "other"])
        .await?
        .unwrap_err();
    assert!(refusal.contains("no pool other"), "{refusal}");
    let bad = written(&stack, "bad.yaml", "kind: Pod\n")?;
    let refusal = explain(
        &mut stack,
        &file,
        &["--config", bad.to_str().ok_or("a path in UTF-8")?],
    )
    .await?
    .unwrap_err();
    assert!(
        refusal.contains("must be EndpointPickerConfig"),
        "{refusal}"
    );
    let absent = stack.folder().join("absent.json");
    let refusal = explain(&mut stack, &absent, &[]).await?.unwrap_err();
    assert!(refusal.contains("absent.json"), "{refusal}");
    Ok(())
}

#[tokio::test]
async fn reasons_come_with_a_refusal_too() -> Result<()> {
    let gateway = testbed::envoy::subset_hint_filter();
    let stack = Stack::builder()
        .servers(1)
        .filter_before_picker(gateway)
        .picker(json!({"explain": true}))
        .shared_envoy()
        .start()
        .await?;
    let mut request = chat(&stack, "hello", "explain-refused")?;
    request
        .headers_mut()
        .insert("x-switchpoint-explain", "1".parse()?);
    request
        .headers_mut()
        .insert("x-test-subset", "10.9.9.9:1".parse()?);
    let reply = stack.send(request).await?;
    assert_eq!(reply.status, 503, "{}", reply.text());
    let reasons: Value = serde_json::from_str(reply.header("x-switchpoint-decision"))?;
    let row = json!({"endpoint": stack.servers[0].addr().to_string(), "dropped_by": "subset", "scores": {}, "total": null,
        "predicted": {"cached_tokens": 0, "uncached_tokens": 2}});
    assert_eq!(
        reasons,
        json!({"picked": [], "refused": "rejected-no-endpoints", "candidates": [row]})
    );
    Ok(())
}
