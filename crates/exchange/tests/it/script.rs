//! Exchanges as readable scripts: each line is an event, and the `=>` lines below it are what the
//! exchange requires from its host.
//!
//! `UPDATE_GOLDENS=1` writes the outcomes into the files; read the diff before committing it.

use std::fmt::Write as _;
use std::path::Path;

use exchange::{
    DecideAt, DestinationFormat, Exchange, ExchangeSettings, ExchangeStep, FailureMode,
    HeaderTrust, HeadersStep, LocalReply, ManagedPool, ResponseBody, ResponseHead, ResponseOrigin,
    Timestamp,
};
use pool_state::ModelLabel;
use scheduler::objects::{ModelSpec, ObjectiveSpec, Objects, ObjectsSpec, TargetSpec};
use scheduler::plugin::ParameterValue;
use scheduler::{
    Endpoint, EndpointMetrics, EndpointRef, Generation, Pipeline, PipelineSpec, PluginSpec,
    ProfilePlugin, ProfileSpec, ROLE_LABEL, Readiness, Slot, Snapshot, Version,
};

struct ExchangeScript {
    settings: ExchangeSettings,
    pool: ManagedPool,
    endpoints: Vec<(Endpoint, EndpointMetrics)>,
    objects: ObjectsSpec,
    pipeline: PipelineSpec,
    sequence: u64,
    exchange: Exchange,
    request: Vec<(String, String)>,
    hint: Option<Vec<u8>>,
    now: Timestamp,
    out: String,
}

#[test]
fn every_script_says_what_happens() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/exchanges");
    let mut files: Vec<_> = std::fs::read_dir(&dir)
        .unwrap()
        .map(|f| f.unwrap().path())
        .collect();
    files.sort();
    assert!(
        files.len() >= 8,
        "the scripts are gone from {}",
        dir.display()
    );
    let mut wrong = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let now = ExchangeScript::new().run(&text);
        if std::env::var_os("UPDATE_GOLDENS").is_some() {
            std::fs::write(&file, &now).unwrap();
        } else if now != text {
            wrong.push(format!("{}:\n{now}", file.display()));
        }
    }
    assert!(
        wrong.is_empty(),
        "these went otherwise:\n{}",
        wrong.join("\n")
    );
}

impl ExchangeScript {
    fn new() -> Self {
        Self {
            settings: ExchangeSettings::default(),
            pool: ManagedPool::new(1, 4096),
            endpoints: Vec::new(),
            objects: ObjectsSpec::default(),
            pipeline: pipeline(),
            sequence: 0,
            exchange: Exchange::new(Timestamp(0)),
            request: Vec::new(),
            hint: None,
            now: Timestamp(0),
            out: String::new(),
        }
    }

    fn run(mut self, text: &str) -> String {
        for line in text.lines().filter(|l| !l.starts_with("=> ")) {
            writeln!(self.out, "{line}").unwrap();
            let (verb, rest) = line
                .trim_start()
                .split_once(' ')
                .unwrap_or((line.trim_start(), ""));
            match verb {
                "" | "#" => {}
                "setting" => self.setting(rest),
                "endpoint" => self.endpoint(rest),
                "model" => self.model(rest),
                "objective" => self.objective(rest),
                "plugin" => self.plugin(rest),
                "profile" => self.profile(rest),
                "pool_update" => self.install(),
                "request" => self.request(rest),
                "header" => self.request.push(pair(rest)),
                "hint" => self.hint = Some(rest.as_bytes().to_vec()),
                "headers" => self.headers(rest == "end"),
                "body" => self.decide(rest.replace("\\n", "\n").as_bytes()),
                "body-bytes" => self.decide(&vec![b' '; rest.parse().unwrap()]),
                "grows" => self.grows(rest.parse().unwrap()),
                "wait" => {
                    self.now = self
                        .now
                        .plus_ms(rest.trim_end_matches("ms").parse().unwrap());
                }
                "response" => self.response(rest),
                "chunk" => self.chunk(rest.replace("\\n", "\n").as_bytes(), false),
                "last" => self.chunk(rest.replace("\\n", "\n").as_bytes(), true),
                "end" => self.end(),
                "ledger" => self.ledger(),
                "counters" => self.counters(),
                other => panic!("no such verb: {other}"),
            }
        }
        self.out
    }

    fn say(&mut self, text: &str) {
        for line in text.lines() {
            writeln!(self.out, "=> {line}").unwrap();
        }
    }

    fn setting(&mut self, rest: &str) {
        match rest {
            "destination_format single" => {
                self.settings.destination.format = DestinationFormat::Single;
            }
            "failure_mode open" => self.settings.failure_mode = FailureMode::Open,
            "decide_at headers" => self.settings.decide_at = DecideAt::Headers,
            "model_header x-model" => self.settings.model_header = "x-model".to_owned(),
            "explain" => self.settings.explain = true,
            "objective_header trust" => self.settings.objective_header = HeaderTrust::Trust,
            "body_limit 100" => self.settings.body_limit_bytes = 100,
            "per_try_timeout 300" => self.settings.retry.per_try_timeout_ms = 300,
            other => panic!("no such setting: {other}"),
        }
    }

    /// Reads `endpoint 10.0.0.1:8000 queue=3 kv=0.5 not-ready`.
    fn endpoint(&mut self, rest: &str) {
        let mut words = rest.split(' ');
        let address = words.next().unwrap();
        let slot = Slot(u16::try_from(self.endpoints.len()).unwrap());
        let mut endpoint = Endpoint {
            id: EndpointRef {
                slot,
                generation: Generation(1),
            },
            name: format!("pod-{}", slot.0).into(),
            address: address.into(),
            readiness: Readiness::Ready,
            labels: Box::new([]),
            models: std::sync::Arc::default(),
            age_ms: 60_000,
        };
        let mut metrics = EndpointMetrics::default();
        for word in words {
            match word.split_once('=') {
                None => endpoint.readiness = Readiness::NotReady,
                Some(("queue", n)) => metrics.queue_depth = Some(n.parse().unwrap()),
                Some(("kv", n)) => metrics.kv_cache_utilization = Some(n.parse().unwrap()),
                Some(("models", models)) => {
                    endpoint.models = models.split(',').map(Into::into).collect();
                }
                Some(("role", role)) => {
                    endpoint.labels = Box::new([(ROLE_LABEL.into(), role.into())]);
                }
                Some((other, _)) => panic!("no such metric: {other}"),
            }
        }
        self.endpoints.push((endpoint, metrics));
    }

    /// Reads `plugin disagg-profile-handler deciders prefill=always-disagg-pd-decider`. With a name
    /// (`deciders`), the parameter is a map; without, it is a plain value.
    fn plugin(&mut self, rest: &str) {
        let mut words = rest.split(' ');
        let mut plugin = PluginSpec::of_type(words.next().unwrap());
        let value = |text: &str| {
            text.parse().map_or_else(
                |_| ParameterValue::Text(text.to_owned()),
                ParameterValue::Number,
            )
        };
        let mut map = None;
        for word in words {
            match (word.split_once('='), map) {
                (None, _) => map = Some(word),
                (Some((name, text)), None) => {
                    plugin.parameters.push((name.to_owned(), value(text)));
                }
                (Some((name, text)), Some(map)) => {
                    plugin.parameters.push((
                        map.to_owned(),
                        ParameterValue::Map(vec![(name.to_owned(), value(text))]),
                    ));
                }
            }
        }
        if plugin.plugin_type.ends_with("-profile-handler") {
            self.pipeline
                .profile_handler
                .clone_from(&plugin.plugin_type);
        }
        self.pipeline
            .plugins
            .retain(|other| other.plugin_type != plugin.plugin_type);
        self.pipeline.plugins.push(plugin);
    }

    /// Reads `profile decode decode-filter queue-scorer`.
    fn profile(&mut self, rest: &str) {
        let mut words = rest.split(' ');
        let name = words.next().unwrap().to_owned();
        let plugins = words
            .map(|name| ProfilePlugin {
                name: name.to_owned(),
                weight: 1.0,
            })
            .collect();
        self.pipeline
            .profiles
            .retain(|profile| profile.name != "default" && profile.name != name);
        self.pipeline.profiles.push(ProfileSpec { name, plugins });
    }

    /// Reads `model gpt is served as llama` or `model gpt is sheddable`.
    fn model(&mut self, rest: &str) {
        let (name, priority, targets) = match rest.split_once(" is served as ") {
            Some((name, target)) => (
                name,
                0,
                vec![TargetSpec {
                    model: target.into(),
                    weight: None,
                }],
            ),
            None => (rest.strip_suffix(" is sheddable").unwrap(), -1, vec![]),
        };
        self.objects.models.push(ModelSpec {
            name: name.into(),
            priority,
            targets,
        });
    }

    /// Reads `objective batch -1`.
    fn objective(&mut self, rest: &str) {
        let (name, priority) = rest.split_once(' ').unwrap();
        self.objects.objectives.push(ObjectiveSpec {
            name: name.into(),
            priority: priority.parse().unwrap(),
        });
    }

    fn install(&mut self) {
        self.sequence += 1;
        let pipeline = Pipeline::build(&self.pipeline).unwrap();
        let (endpoints, metrics): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.endpoints).into_iter().unzip();
        let version = Version {
            term: 1,
            sequence: self.sequence,
        };
        let objects = Objects::build(&self.objects).unwrap();
        let snapshot = Snapshot::try_new(version, endpoints, metrics.clone(), pipeline)
            .unwrap()
            .with_objects(objects);
        let fresh = snapshot.with_metrics(version, metrics).unwrap();
        self.pool.install(snapshot, 42, 5_000);
        self.pool.refresh(fresh, self.now);
    }

    fn request(&mut self, rest: &str) {
        let (method, path) = rest.split_once(' ').unwrap();
        self.exchange = Exchange::new(self.now);
        self.request = vec![
            (":method".into(), method.into()),
            (":path".into(), path.into()),
        ];
        self.hint = None;
    }

    fn headers(&mut self, end: bool) {
        let pairs = self.request.clone();
        let stripped: Vec<&str> = pairs
            .iter()
            .map(|(n, _)| n.as_str())
            .filter(|n| self.settings.removes(n.as_bytes()))
            .collect();
        if !stripped.is_empty() {
            self.say(&format!("strip {}", stripped.join(", ")));
        }
        let pairs = pairs.iter().map(|(n, v)| (n.as_bytes(), v.as_bytes()));
        self.exchange.capture_headers(&self.pool, pairs.clone());
        match self.exchange.request_headers(&self.settings, pairs, end) {
            HeadersStep::Buffer => self.say("buffer"),
            HeadersStep::Decide => self.decide(b""),
            HeadersStep::Ready => self.say("ready path"),
            HeadersStep::Reply(reply) => self.reply(&reply),
        }
    }

    fn grows(&mut self, bytes: usize) {
        match self.exchange.check_body_size(&self.settings, bytes) {
            Some(reply) => self.reply(&reply),
            None => self.say("go on"),
        }
    }

    fn decide(&mut self, body: &[u8]) {
        let hint = self.hint.clone();
        match self.exchange.decide(
            &self.settings,
            &mut self.pool,
            hint.as_deref(),
            body,
            self.now,
        ) {
            ExchangeStep::Forward(forward) => {
                for (name, value) in forward.set {
                    self.say(&format!("set {name}: {value}"));
                }
                if let Some(splice) = forward.body {
                    let rest = &body[splice.range.end..];
                    self.say(&format!(
                        "send {}",
                        String::from_utf8_lossy(&[&splice.beginning(body.to_vec()), rest].concat())
                    ));
                }
            }
            ExchangeStep::Reply(reply) => self.reply(&reply),
            ExchangeStep::Hold { number } => self.say(&format!("hold as {number}")),
            ExchangeStep::Park { deadline } => self.say(&format!(
                "park until {} ms",
                deadline.ms_since(Timestamp(0))
            )),
        }
    }

    fn reply(&mut self, reply: &LocalReply) {
        self.say(&format!("reply {}", reply.status));
        for (name, value) in &reply.headers {
            self.say(&format!("  {name}: {value}"));
        }
        self.say(&format!("  {}", String::from_utf8_lossy(&reply.body)));
    }

    /// Reads `response upstream 200 10.0.0.1:8000 attempts=2 type=text/event-stream load=TEXT…`.
    fn response(&mut self, rest: &str) {
        let mut words = rest.split(' ');
        let origin = match words.next().unwrap() {
            "upstream" => ResponseOrigin::Upstream,
            "proxy" => ResponseOrigin::Proxy,
            _ => ResponseOrigin::Ours,
        };
        let mut head = ResponseHead {
            origin,
            status: words.next().unwrap().parse().unwrap(),
            upstream_address: words.next().map(str::as_bytes),
            attempts: 1,
            content_type: Some(b"application/json"),
            ..ResponseHead::default()
        };
        for word in words {
            match word.split_once('=').unwrap() {
                ("attempts", n) => head.attempts = n.parse().unwrap(),
                ("type", t) => head.content_type = Some(t.as_bytes()),
                ("encoding", _) => head.encoded = true,
                ("length", n) => head.content_length = Some(n.parse().unwrap()),
                (_, _) => head.load = Some(b"TEXT named_metrics.kv_cache_usage_perc=0.4, named_metrics.num_requests_waiting=9"),
            }
        }
        let step = self
            .exchange
            .response_headers(&mut self.pool, &head, self.now);
        for name in step.remove {
            self.say(&format!("remove {name}"));
        }
        for (name, value) in step.set {
            self.say(&format!("set {name}: {value}"));
        }
        self.say(match step.body {
            ResponseBody::Ignore => "ignore the body",
            ResponseBody::Read => "read the body",
            ResponseBody::Restore => "restore the body as it comes",
            ResponseBody::Hold => "hold the body and restore it whole",
        });
    }

    fn chunk(&mut self, bytes: &[u8], last: bool) {
        let instead = self
            .exchange
            .response_chunk(&mut self.pool, bytes, last, self.now)
            .map(|b| String::from_utf8_lossy(b).replace('\n', "\\n"));
        if let Some(instead) = instead {
            self.say(&format!("instead {instead}"));
        }
    }

    fn end(&mut self) {
        match self.exchange.end(&mut self.pool, self.now) {
            Some(o) => self.say(&format!(
                "status {} served {} failed_attempts {} ttft {:?} duration {} prompt {:?} completion {:?} cached {:?} estimated {}",
                o.status,
                o.served,
                o.failed_attempts,
                o.ttft_ms,
                o.duration_ms,
                o.usage.prompt_tokens,
                o.usage.completion_tokens,
                o.usage.cached_tokens,
                o.usage.estimated
            )),
            None => self.say("nothing held"),
        }
    }

    fn counters(&mut self) {
        let counters = self.pool.counters();
        let mut lines: Vec<String> = counters
            .models()
            .iter()
            .map(|m| {
                format!(
                    "model {}: {} requests, {} running, {} B in, {} B out, prompt {}, completion {}, cached {}, errors {:?}",
                    label(&m.label),
                    m.requests,
                    m.running,
                    m.request_bytes,
                    m.response_bytes,
                    m.tokens.prompt,
                    m.tokens.completion,
                    m.tokens.cached,
                    m.errors
                )
            })
            .collect();
        lines.extend(counters.endpoints().iter().map(|e| {
            format!(
                "slot {}: picked {}, served {}, failed {}",
                e.endpoint.slot.0, e.picked, e.served, e.failed
            )
        }));
        lines.extend(
            counters
                .dropped()
                .iter()
                .map(|(reason, count)| format!("dropped {reason}: {count}")),
        );
        self.say(&lines.join("\n"));
    }

    fn ledger(&mut self) {
        let rows: Vec<String> = self
            .pool
            .in_flight()
            .rows()
            .map(|(e, l)| {
                format!(
                    "slot {}: {} requests, {} prefill tokens, {} decode tokens",
                    e.slot.0, l.requests, l.prefill_tokens, l.decode_tokens
                )
            })
            .collect();
        self.say(if rows.is_empty() { "empty" } else { "" });
        self.say(&rows.join("\n"));
    }
}

/// Returns the pipeline of scripts that define none.
fn pipeline() -> PipelineSpec {
    let plugins = [
        ("queue-scorer", 1.0),
        ("prefix-cache-scorer", 10.0),
        ("max-score-picker", 1.0),
    ];
    PipelineSpec::of_one_profile(
        "default",
        plugins
            .map(|(name, weight)| (PluginSpec::of_type(name), weight))
            .into(),
        3,
    )
}

/// Returns the model, and the other labels where they differ from the usual ones.
fn label(label: &ModelLabel) -> String {
    let target = if label.target_model == label.model {
        String::new()
    } else {
        format!(" as {:?}", label.target_model)
    };
    let priority = if label.priority == 0 {
        String::new()
    } else {
        format!(" at {}", label.priority)
    };
    format!("{:?}{target}{priority}", label.model)
}

fn pair(text: &str) -> (String, String) {
    let (name, value) = text.split_once(": ").unwrap();
    (name.into(), value.into())
}
