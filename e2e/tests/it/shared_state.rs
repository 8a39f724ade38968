//! Several workers pick as one: each knows the requests of the others, the endpoints that failed at
//! them, and the prompts they placed.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use e2e::explain::ExplainedDecision;
use futures::future::join_all;
use serde_json::json;
use testbed::fleet::{BURST, BURST_MAX, BURST_SERVERS, ConversationPlan, Fleet, FleetShape};
use testbed::model_server::{FaultMode, ModelServerOptions, ServerFault};
use testbed::second_envoy::SecondEnvoy;
use testbed::stack::{Stack, StackBuilder};
use testbed::{Result, wait_for};

use crate::echo;

mod dictionary;
mod outsider;
mod refused;
mod secrecy;
use outsider::{SimulatedPeer, report_until_seen, tells_apart};

const WORKERS: u32 = 4;

/// Sends requests so that every worker has served. The probability that one of four workers gets
/// none of a hundred connections is about 10^-12.
async fn warm(stack: &Stack) -> Result<()> {
    for reply in join_all((0..100).map(|_| stack.get("/v1/models"))).await {
        assert_eq!(reply?.status, 200);
    }
    Ok(())
}

/// Returns the number of attempts that a refusing endpoint costs within its first ejection, over
/// all workers.
async fn attempts_at_a_dead_endpoint(sharing: bool) -> Result<i64> {
    let stack = Stack::builder()
        .servers(4)
        .concurrency(WORKERS)
        .picker(json!({"sharing": sharing}))
        .start()
        .await?;
    warm(&stack).await?;
    stack.servers[0]
        .fault(ServerFault::new(FaultMode::Refuse))
        .await;
    let failed = || stack.envoy.picker_stat("switchpoint_failed_attempts_total");
    while failed().await? == 0 {
        assert_eq!(stack.get("/v1/models").await?.status, 200);
    }
    // The other workers learn of the failure within this pause, and the ejection lasts a second.
    tokio::time::sleep(Duration::from_millis(2)).await;
    let before = failed().await?;
    let end = Instant::now() + Duration::from_millis(600);
    while Instant::now() < end {
        for reply in join_all((0..8).map(|_| stack.get("/v1/models"))).await {
            assert_eq!(reply?.status, 200);
        }
    }
    assert_eq!(before, 1, "only one request met the failure");
    failed().await
}

#[tokio::test]
async fn what_fails_at_one_worker_costs_no_other_a_try() -> Result<()> {
    assert_eq!(attempts_at_a_dead_endpoint(true).await?, 1);
    Ok(())
}

#[tokio::test]
async fn without_sharing_every_worker_pays_for_the_same_failure() -> Result<()> {
    assert!(
        attempts_at_a_dead_endpoint(false).await? > 1,
        "the test above would not notice missing sharing"
    );
    Ok(())
}

/// A test holds this lock while it measures a burst. Two fleets at the same time on two cores delay
/// each other's workers, which then pick by old state: of 8 runs with both tests at the same time 4
/// failed, of 8 runs alone none.
static ONE_FLEET: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// The maximum number of bursts for each shape. A burst is also uneven if the machine delays a
/// worker, which then picks by old state: with 16 workers on two busy cores, one burst in three.
const BURSTS: usize = 7;

/// The number of bursts that must be even.
const EVEN: usize = 2;

async fn check_spread(shape: FleetShape) -> Result<()> {
    let _alone = ONE_FLEET.lock().await;
    let fleet = Fleet::for_bursts(shape, true).await?;
    let mut fullest = Vec::new();
    for seed in 0..BURSTS {
        fullest.push(fleet.burst(seed).await?);
        if fullest.iter().filter(|most| **most <= BURST_MAX).count() == EVEN {
            return Ok(());
        }
    }
    Err(format!("{shape:?}: {fullest:?} of {BURST} at one of {BURST_SERVERS}").into())
}

/// Shows that [`check_spread`] can fail. A few workers without shared state each go through all
/// servers in turn, which looks like an even spread. With many workers, no worker gets through all
/// servers.
async fn check_pile(shape: FleetShape) -> Result<()> {
    let _alone = ONE_FLEET.lock().await;
    let fleet = Fleet::for_bursts(shape, false).await?;
    for seed in 0..10 {
        if fleet.burst(seed).await? > BURST_MAX {
            return Ok(());
        }
    }
    Err(format!("{shape:?}: the bursts were spread even without sharing").into())
}

#[tokio::test]
async fn a_burst_of_cold_prompts_is_spread_over_all_by_all_workers() -> Result<()> {
    check_spread(FleetShape {
        proxies: 1,
        workers: 4,
    })
    .await?;
    check_spread(FleetShape {
        proxies: 1,
        workers: 16,
    })
    .await
}

#[tokio::test]
async fn without_sharing_a_burst_piles_up() -> Result<()> {
    check_pile(FleetShape {
        proxies: 1,
        workers: 8,
    })
    .await
}

#[tokio::test]
async fn a_prompt_finds_its_endpoint_again_through_any_worker() -> Result<()> {
    let stack = Stack::builder()
        .servers(6)
        .concurrency(WORKERS)
        .envoy_in_turn()
        .start()
        .await?;
    warm(&stack).await?;
    for round in 0..10 {
        // The engines answer immediately, so the learned cost of a token is at its minimum. The
        // prompt must be long enough that its cached prefix is worth more than 1 ms, the difference
        // that counts as equal.
        let prompt = format!(
            "{round} conversations. {}",
            "They go on and on. ".repeat(800)
        );
        let first = stack.server_of(
            &stack
                .post("/v1/chat/completions", &echo::chat(&prompt))
                .await?,
        )?;
        tokio::time::sleep(Duration::from_millis(10)).await;
        for turn in 0..12 {
            let reply = stack
                .post(
                    "/v1/chat/completions",
                    &echo::chat(&format!("{prompt} {turn}")),
                )
                .await?;
            assert_eq!(
                stack.server_of(&reply)?,
                first,
                "round {round}, turn {turn}"
            );
        }
    }
    assert_eq!(
        stack
            .envoy
            .picker_stat("switchpoint_placements_lost_total")
            .await?,
        0
    );
    Ok(())
}

// === Between proxies ===

/// The plugins are a scorer of load and a scorer of prefixes, whose scores the tests read.
const ASKED: &str = "apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: active-request-scorer
- type: prefix-cache-scorer
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: active-request-scorer
  - pluginRef: prefix-cache-scorer
  - pluginRef: max-score-picker
";

fn explaining_stack(config: &tempfile::NamedTempFile) -> Result<StackBuilder> {
    std::fs::write(config.path(), ASKED)?;
    let path = config.path().to_str().ok_or("no path")?;
    Ok(Stack::builder()
        .picker(json!({"explain": true}))
        .daemon_arguments(&["--config", path]))
}

#[tokio::test]
async fn what_fails_at_one_proxy_costs_the_other_no_try() -> Result<()> {
    let fleet = Fleet::start(
        FleetShape {
            proxies: 2,
            workers: 1,
        },
        true,
        4,
        &ModelServerOptions {
            speed: 0.0,
            ..ModelServerOptions::default()
        },
    )
    .await?;
    let [one, two] = [&fleet.stack.envoy, &fleet.seconds[0].envoy];
    let failed = "switchpoint_failed_attempts_total";
    fleet.stack.servers[0]
        .fault(ServerFault::new(FaultMode::Refuse))
        .await;
    while one.picker_stat(failed).await? == 0 {
        assert_eq!(
            testbed::client::get(one.listener(), "/v1/models")
                .await?
                .status,
            200
        );
    }
    // The other proxy learns of the failure within this pause, and the ejection lasts a second.
    tokio::time::sleep(Duration::from_millis(200)).await;
    let end = Instant::now() + Duration::from_millis(400);
    while Instant::now() < end {
        for reply in
            join_all((0..8).map(|_| testbed::client::get(two.listener(), "/v1/models"))).await
        {
            assert_eq!(reply?.status, 200);
        }
    }
    assert_eq!(two.picker_stat(failed).await?, 0);
    Ok(())
}

#[tokio::test]
async fn load_of_another_proxy_counts_once_and_expires_when_the_proxy_is_silent() -> Result<()> {
    let config = tempfile::NamedTempFile::new()?;
    let mut stack = explaining_stack(&config)?
        .servers(2)
        .concurrency(2)
        .start()
        .await?;
    let outsider = SimulatedPeer::join(&mut stack).await?;
    tells_apart(&stack, "active-request-scorer", false).await?;
    let (decision, reported) =
        report_until_seen(&stack, &outsider, 0, "active-request-scorer").await?;
    let address = stack.servers[0].addr().to_string();
    let scores = decision.scores("active-request-scorer");
    assert!(
        scores
            .iter()
            .all(|(endpoint, score)| (*endpoint == address) == (*score < 0.5)),
        "{scores:?}"
    );
    // The simulated proxy stays connected and sends nothing more.
    tells_apart(&stack, "active-request-scorer", false).await?;
    let silent = reported.elapsed();
    assert!(
        silent > Duration::from_millis(1_000),
        "the load of a silent proxy counts for two seconds: {silent:?}"
    );
    report_until_seen(&stack, &outsider, 1, "active-request-scorer").await?;
    outsider.tell(1, 0).await?;
    tells_apart(&stack, "active-request-scorer", false).await?;
    Ok(())
}

/// With this configuration, requests wait in the proxy while an endpoint has 16.
const HELD: &str = "\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
- type: active-request-scorer
- type: max-score-picker
- {type: concurrency-detector, parameters: {maxConcurrency: 16}}
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: active-request-scorer
  - pluginRef: max-score-picker
flowControl:
  saturationDetector: {pluginRef: concurrency-detector}
  defaultRequestTTL: 4s
";

fn held(config: &tempfile::NamedTempFile) -> Result<StackBuilder> {
    std::fs::write(config.path(), HELD)?;
    let path = config.path().to_str().ok_or("no path")?;
    Ok(slow_engines().daemon_arguments(&["--config", path]))
}

/// A stack of four engines that take some time for each answer.
fn slow_engines() -> StackBuilder {
    let engine = ModelServerOptions {
        models: vec!["demo".into()],
        speed: 0.0,
        chunk_delay_ms: 150,
        ..ModelServerOptions::default()
    };
    Stack::builder().servers_like(4, &engine).concurrency(1)
}

/// The answers that clients get while a peer sends false reports.
#[derive(Debug)]
struct AnswersBesideLiar {
    /// The number of answers of each server.
    served: [u32; 4],
    slowest: Duration,
}

/// Measures the answers that clients get while a peer sends false reports. The peer reports ten
/// times a second that three of four idle endpoints have the largest load, that two of the
/// endpoints failed, and that the peer holds a million requests. Meanwhile 12 clients send requests
/// through these proxies in turn. Returns the answers from `begin` to `end`.
async fn beside_a_liar(
    stack: &mut Stack,
    proxies: &[SocketAddr],
    begin: Duration,
    end: Duration,
) -> Result<AnswersBesideLiar> {
    let liar = SimulatedPeer::join(stack).await?;
    let lies = async {
        loop {
            if let Err(error) = liar.lie(0..3).await {
                return error;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let stack = &*stack;
    let body = json!({"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]});
    let answers = async {
        let mut answers = AnswersBesideLiar {
            served: [0; 4],
            slowest: Duration::ZERO,
        };
        let lied = Instant::now();
        while lied.elapsed() < end {
            let is_counted = lied.elapsed() >= begin;
            let asked = Instant::now();
            let clients = proxies.iter().cycle().take(12).map(|proxy| {
                testbed::client::post(*proxy, "/v1/chat/completions", body.to_string())
            });
            let replies = join_all(clients).await;
            let slowest = asked.elapsed();
            for reply in replies {
                let reply = reply?;
                assert_eq!(reply.status, 200, "{}", reply.text());
                if is_counted {
                    answers.served[stack.server_of(&reply)?] += 1;
                    answers.slowest = answers.slowest.max(slowest);
                }
            }
        }
        Ok::<AnswersBesideLiar, testbed::Error>(answers)
    };
    tokio::select! {
        answers = answers => answers,
        error = lies => Err(error),
    }
}

/// A false report about failures affects a proxy for 5 s, until the endpoint has succeeded there,
/// and a false report about load for up to 5 s after it begins.
#[tokio::test]
async fn a_peer_that_lies_steers_traffic_for_seconds_and_refuses_nothing() -> Result<()> {
    let config = tempfile::NamedTempFile::new()?;
    let mut stack = held(&config)?.envoy_in_turn().start().await?;
    let proxies = [stack.address()];
    let end = Duration::from_secs(16);
    let answers = beside_a_liar(&mut stack, &proxies, Duration::ZERO, end).await?;
    println!("beside a liar: {answers:?}");
    let mean = answers.served.iter().sum::<u32>() / 4;
    assert!(
        answers
            .served
            .iter()
            .all(|count| (mean / 3..=2 * mean).contains(count)),
        "{mean} requests each, within a factor: {answers:?}"
    );
    Ok(())
}

/// Checks how fast load and placements reach other proxies, and prints the measured delays. The
/// product promises 20 ms for load and 100 ms for placements. The test allows ten times as much on
/// a busy machine.
#[tokio::test]
async fn load_and_placements_reach_other_proxies_in_time_and_nothing_of_a_prompt_does() -> Result<()>
{
    let slow = ModelServerOptions {
        models: vec!["demo".into()],
        speed: 0.0,
        chunk_delay_ms: 300,
        ..ModelServerOptions::default()
    };
    let mut stack = Stack::builder()
        .servers_like(2, &slow)
        .shared_envoy()
        .start()
        .await?;
    let mut outsider = SimulatedPeer::join(&mut stack).await?;
    // From now on the proxy knows that it has a peer.
    outsider.hear_until(0).await?;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let secret = "the password of the safe is swordfish";
    let mut delays = Vec::new();
    let mut placed = 0;
    for round in 0..10 {
        let prompt = format!("{round} times: {}", format!("{secret}. ").repeat(100));
        let body = json!({"model": "demo", "max_tokens": 1, "stream": true, "messages": [{"role": "user", "content": prompt}]});
        let (asked, heard) = tokio::join!(
            stack.post("/v1/chat/completions", &body),
            outsider.hear_until(1)
        );
        assert_eq!(asked?.status, 200);
        let (delay, placements) = heard?;
        placed += placements;
        delays.push(delay);
        placed += outsider.hear_until(0).await?.1;
    }
    delays.sort_unstable();
    println!("load reached another proxy after {delays:?}, including the request's own way");
    assert!(delays[4] < Duration::from_millis(200), "{delays:?}");
    assert!(placed >= 10, "placements of ten prompts arrived: {placed}");
    let words: Vec<&[u8]> = secret.as_bytes().windows(6).collect();
    let has_word = |bytes: &[u8]| {
        words
            .iter()
            .any(|word| memchr::memmem::find(bytes, word).is_some())
    };
    assert!(
        has_word(format!("a {secret} is found").as_bytes()),
        "the search must be able to find the secret"
    );
    assert!(!outsider.received.iter().any(|bytes| has_word(bytes)));
    Ok(())
}

/// Checks that the affinity is lost as soon as a scrape reports the restart, before any request
/// misses its prefix. The loss reaches the proxies within 50 ms, and the test allows ten times as
/// much.
#[tokio::test]
async fn a_cold_restart_at_the_same_address_loses_all_affinity_at_once() -> Result<()> {
    let config = tempfile::NamedTempFile::new()?;
    let mut stack = explaining_stack(&config)?
        .servers(3)
        .concurrency(2)
        .start()
        .await?;
    let second = SecondEnvoy::start(&stack, "second", 2).await?;
    let proxies = [stack.address(), second.envoy.listener()];
    let mut placed = vec![Vec::new(); stack.servers.len()];
    for number in 0..12 {
        let prompt = format!("{number} {}", "times there was a prompt. ".repeat(100));
        let server = stack.server_of(
            &stack
                .post("/v1/chat/completions", &echo::chat(&prompt))
                .await?,
        )?;
        placed[server].push(prompt);
    }
    let server = (0..placed.len())
        .max_by_key(|server| placed[*server].len())
        .ok_or("no server")?;
    let prompts = &placed[server];
    let address = stack.servers[server].addr().to_string();
    let held = async |proxy: usize, prompt: &String| -> Result<bool> {
        let scores = ExplainedDecision::ask(proxies[proxy], prompt)
            .await?
            .scores("prefix-cache-scorer");
        Ok(scores.get(&address).is_some_and(|score| *score > 0.5))
    };
    for (number, prompt) in prompts.iter().enumerate() {
        let known = || async { held(number % 2, prompt).await.ok()?.then_some(()) };
        wait_for(outsider::LIMIT, "the placed prompts to be known", known).await?;
    }
    stack.servers[server].restart(None).await;
    let daemon = stack.daemon()?;
    let noticed = || async {
        let page = daemon.admin("/metrics").await.ok()?.text();
        let mut restarts = page
            .lines()
            .filter(|line| line.starts_with("switchpoint_endpoint_restarts_total"));
        restarts.any(|line| line.ends_with(" 1")).then_some(())
    };
    wait_for(outsider::LIMIT, "a scrape to report the restart", noticed).await?;
    tokio::time::sleep(Duration::from_millis(500)).await;
    // The test asks for each prompt only once, because a pick places the prompt again.
    for (number, prompt) in prompts.iter().enumerate() {
        assert!(
            !held(number % 2, prompt).await?,
            "proxy {} still counts prompt {number} of {} as cached",
            number % 2,
            prompts.len()
        );
    }
    Ok(())
}

// === A short multi-turn trace ===

/// `make e2e-long` runs these tests.
mod slow {
    use super::*;

    #[tokio::test]
    async fn conversations_hit_as_often_with_many_workers_as_with_one() -> Result<()> {
        let outcome = |shape, sharing| async move {
            let fleet = Fleet::start(shape, sharing, 6, &ModelServerOptions::default()).await?;
            let conversations = ConversationPlan {
                count: 24,
                turns: 4,
                begin_within: Duration::from_secs(3),
                seed: 1,
            };
            fleet.converse(conversations).await
        };
        let one = outcome(FleetShape::ONE, true).await?;
        let four = outcome(FleetShape::FOUR_WORKERS, true).await?;
        let two = outcome(FleetShape::TWO_BY_TWO, true).await?;
        let alone = outcome(
            FleetShape {
                proxies: 2,
                workers: 4,
            },
            false,
        )
        .await?;
        println!("{one:?}\n{four:?}\n{two:?}\n{alone:?}");
        assert!(
            one.hit_rate - four.hit_rate < 0.05 && one.hit_rate - two.hit_rate < 0.05,
            "{one:?} {four:?} {two:?}"
        );
        assert!(
            one.hit_rate - alone.hit_rate > 0.05,
            "without sharing the hit rate must be lower: {one:?} {alone:?}"
        );
        Ok(())
    }

    #[tokio::test]
    async fn a_liar_among_four_proxies_moves_few_requests_and_delays_none() -> Result<()> {
        let config = tempfile::NamedTempFile::new()?;
        check_share_of_each_engine(held(&config)?).await
    }

    #[tokio::test]
    async fn a_liar_moves_few_requests_of_the_default_policy() -> Result<()> {
        check_share_of_each_engine(slow_engines()).await
    }

    /// Counts from the moment at which the false reports have no effect any more. From then on,
    /// each engine serves between two thirds and one and a half of the mean.
    async fn check_share_of_each_engine(stack: StackBuilder) -> Result<()> {
        let mut stack = stack.start().await?;
        let second = SecondEnvoy::start(&stack, "second", 1).await?;
        let third = SecondEnvoy::start(&stack, "third", 1).await?;
        let proxies = [
            stack.address(),
            second.envoy.listener(),
            third.envoy.listener(),
        ];
        let [begin, end] = [5, 20].map(Duration::from_secs);
        let answers = beside_a_liar(&mut stack, &proxies, begin, end).await?;
        let all: u32 = answers.served.iter().sum();
        for count in answers.served {
            assert!(8 * count <= 3 * all, "1.5 times the mean: {answers:?}");
            assert!(6 * count >= all, "two thirds of the mean: {answers:?}");
        }
        // Before reports about load and backlog had limits, half of the answers took 4 s.
        assert!(answers.slowest < Duration::from_secs(2), "{answers:?}");
        Ok(())
    }

    /// A peer places three times as much as each engine can cache. Before each proxy had a share,
    /// such placements left three of twelve prompts at their engines. All proxies of this test have
    /// one address, so the hostile peer has the share of one process.
    #[tokio::test]
    async fn placements_that_no_engine_has_move_few_prompts() -> Result<()> {
        let engine = ModelServerOptions {
            models: vec!["demo".into()],
            // The memory holds 8,192 blocks of the prefix index.
            num_gpu_blocks: Some(32_768),
            speed: 0.0,
            ..ModelServerOptions::default()
        };
        let mut stack = Stack::builder()
            .servers_like(4, &engine)
            .concurrency(1)
            .start()
            .await?;
        let second = SecondEnvoy::start(&stack, "second", 1).await?;
        let third = SecondEnvoy::start(&stack, "third", 1).await?;
        let proxies = [
            stack.address(),
            second.envoy.listener(),
            third.envoy.listener(),
        ];
        let liar = SimulatedPeer::join(&mut stack).await?;
        let ask = async |proxy: usize, prompt: &String| -> Result<usize> {
            let address = proxies[proxy % proxies.len()];
            let body = echo::chat(prompt).to_string();
            let reply = testbed::client::post(address, "/v1/chat/completions", body).await?;
            stack.server_of(&reply)
        };
        // From now on each proxy knows that it has peers.
        tokio::time::sleep(Duration::from_secs(1)).await;
        let prompts: Vec<String> = (0..12)
            .map(|client| format!("{client} clients. {}", "They go on and on. ".repeat(1_000)))
            .collect();
        let mut servers = Vec::new();
        for (proxy, prompt) in prompts.iter().enumerate() {
            servers.push(ask(proxy, prompt).await?);
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        liar.place_invented(0..4).await?;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let mut returned = 0;
        for (proxy, prompt) in prompts.iter().enumerate() {
            returned += usize::from(ask(proxy + 1, prompt).await? == servers[proxy]);
        }
        println!(
            "{returned} of {} prompts return to their engine",
            prompts.len()
        );
        assert!(returned >= 11, "{returned} of {}", prompts.len());
        Ok(())
    }

    /// The test relies on two proxies sharing their load within 10 ms. On two busy cores the
    /// proxies sometimes take longer: in the median of three bursts, one server once got 6
    /// requests.
    #[tokio::test]
    async fn a_burst_of_cold_prompts_is_spread_by_all_proxies() -> Result<()> {
        check_spread(FleetShape {
            proxies: 2,
            workers: 2,
        })
        .await?;
        check_spread(FleetShape {
            proxies: 2,
            workers: 4,
        })
        .await
    }

    #[tokio::test]
    async fn proxies_that_do_not_share_pile_up_a_burst() -> Result<()> {
        check_pile(FleetShape {
            proxies: 2,
            workers: 4,
        })
        .await
    }

    /// The test relies on a placement reaching another proxy within 2 s. `make test` checks without
    /// a time limit that a placement arrives
    /// (`a_cold_restart_at_the_same_address_loses_all_affinity_at_once`).
    #[tokio::test]
    async fn what_one_proxy_placed_another_finds() -> Result<()> {
        let fleet = Fleet::start(
            FleetShape::TWO_BY_TWO,
            true,
            6,
            &ModelServerOptions::default(),
        )
        .await?;
        let [one, two] = [fleet.stack.address(), fleet.seconds[0].envoy.listener()];
        let post = |address, prompt: String| async move {
            testbed::client::post(
                address,
                "/v1/chat/completions",
                echo::chat(&prompt).to_string(),
            )
            .await
        };
        for round in 0..8 {
            let prompt = format!(
                "{round} conversations. {}",
                "They go on and on. ".repeat(200)
            );
            let (first, then) = if round % 2 == 0 {
                (one, two)
            } else {
                (two, one)
            };
            let server = fleet.stack.server_of(&post(first, prompt.clone()).await?)?;
            // Waits twenty times as long as the product allows for a placement to reach another
            // proxy.
            tokio::time::sleep(Duration::from_secs(2)).await;
            for turn in 0..6 {
                let reply = post(then, format!("{prompt} {turn}")).await?;
                assert_eq!(
                    fleet.stack.server_of(&reply)?,
                    server,
                    "round {round}, turn {turn}"
                );
            }
        }
        Ok(())
    }
}
