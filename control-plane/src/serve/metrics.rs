//! The `/metrics` page for Prometheus, in OpenMetrics.
//!
//! Metrics with the meaning of llm-d's have the names of llm-d (`llm_d_epp_*`, llm-d-router
//! `docs/metrics.md`); all others are `switchpoint_*`. Metrics of requests have one more label than
//! in llm-d, `pool`, because one daemon serves several pools. Histograms of tokens have only the
//! unbounded bucket: proxies report sums, which is enough for rates and means.

mod ext_proc;
mod flow_control;
mod page;
mod scaling;

use std::fmt;
use std::time::SystemTime;

use discovery::BackendStatus;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Registry;
use scheduler::EndpointMetrics;
use tokio::time::Instant;

use self::page::{HistogramBuckets, MetricLabels, MetricsPage, count, flag, float, moments, with};
use crate::cli::build::COMMIT;
use crate::learn::directory::LearnerReport as Learner;
use crate::learn::latency::{PredictedTarget, PredictionScore, RATIO_BOUNDS};
use crate::pool::writer::PoolView;
use crate::scrape::{DURATION_BUCKETS_MS, ScrapeCounts};
use crate::serve::shown_state::ShownState;
use crate::state::counters::{CounterTotals, ModelTotals, TotalsHistogram};
use crate::state::eds_streams::ProxyEds;
use crate::state::proxies::ConnectedProxy;

/// All values at one moment.
#[derive(Debug)]
struct MetricsCollector {
    shown: ShownState,
    pools: Vec<PoolCounts>,
}

#[derive(Debug)]
struct PoolCounts {
    view: PoolView,
    totals: CounterTotals,
    scrapes: Option<ScrapeCounts>,
    learner: Option<Learner>,
}

type TimeHistogram = fn(&ModelTotals) -> &TotalsHistogram;
type ModelSum = fn(&ModelTotals) -> u64;
type EndpointGauge = fn(&EndpointMetrics) -> Option<f32>;
/// Name, help text and value.
type LatencyGauge = (&'static str, &'static str, fn(&PredictionScore) -> f64);

/// The text of `/metrics`.
///
/// # Errors
/// None in practice, because it writes to memory; the encoder's signature has an error.
pub fn page(shown: &ShownState) -> Result<String, fmt::Error> {
    let now = Instant::now();
    let shared = &shown.shared;
    let views: Vec<PoolView> = shared.pools.all();
    let counters = shared.reports.counters();
    let pools = views.into_iter().map(|view| PoolCounts {
        totals: counters.totals(&view.name, now),
        scrapes: shared
            .reports
            .scrape_stats(&view.name)
            .map(|stats| stats.counts()),
        learner: shared.learned.report(&view.name),
        view,
    });
    let pools = pools.collect();
    drop(counters);
    let exposition = MetricsCollector {
        shown: shown.clone(),
        pools,
    };
    let mut registry = Registry::default();
    registry.register_collector(Box::new(exposition));
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry)?;
    Ok(text)
}

impl Collector for MetricsCollector {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let mut page = MetricsPage(encoder);
        self.requests(&mut page)?;
        self.pools(&mut page)?;
        self.scheduler(&mut page)?;
        self.flow_control(&mut page)?;
        self.endpoints(&mut page)?;
        self.scrapes(&mut page)?;
        self.latency(&mut page)?;
        self.scaling(&mut page)?;
        self.relayed(&mut page)?;
        self.daemon(&mut page)
    }
}

// === impl MetricsCollector ===

impl MetricsCollector {
    fn requests(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let rows = || {
            self.pools.iter().flat_map(|pool| {
                pool.totals.models.iter().map(|(label, totals)| {
                    let labels = vec![
                        ("pool", pool.view.name.to_string()),
                        ("model_name", label.model.clone()),
                        ("target_model_name", label.target.clone()),
                        ("priority", label.priority.to_string()),
                    ];
                    (labels, totals)
                })
            })
        };
        page.counter(
            "llm_d_epp_request",
            "Requests.",
            rows().map(|(labels, m)| (labels, m.requests)),
        )?;
        let errors = rows().flat_map(|(labels, m)| {
            m.errors
                .iter()
                .map(move |(code, count)| (with(&labels, "error_code", code), *count))
        });
        page.counter(
            "llm_d_epp_request_error",
            "Requests answered with an error, by HTTP status.",
            errors,
        )?;
        page.gauge(
            "llm_d_epp_request_running",
            "Requests outstanding.",
            rows().map(|(labels, m)| (labels, float(m.running))),
        )?;
        let times: [(&str, &str, TimeHistogram); 3] = [
            (
                "llm_d_epp_request_duration_seconds",
                "Time from a request to the end of its response, the time included in which it was held.",
                |m| &m.duration_ms,
            ),
            (
                "llm_d_epp_request_ttft_seconds",
                "Time to the first token, the time included in which the request was held.",
                |m| &m.ttft_ms,
            ),
            (
                "llm_d_epp_request_streaming_tpot_seconds",
                "Time for each token after the first.",
                |m| &m.tpot_ms,
            ),
        ];
        for (name, help, of) in times {
            page.histogram(
                name,
                help,
                rows().map(|(labels, m)| (labels, HistogramBuckets::scaled(of(m), 1e-3))),
            )?;
        }
        let slos = rows()
            .filter(|(_, m)| m.slo.iter().any(|count| *count > 0))
            .flat_map(|(labels, m)| {
                ["met", "missed", "shed"]
                    .into_iter()
                    .zip(m.slo)
                    .map(move |(outcome, count)| (with(&labels, "outcome", outcome), count))
            });
        page.counter(
            "switchpoint_slo_requests",
            "Requests with an SLO: met, missed, or shed.",
            slos,
        )?;
        let missed = rows().flat_map(|(labels, m)| {
            pool_state::MISS_CAUSES
                .into_iter()
                .zip(m.missed_tokens)
                .map(move |(cause, tokens)| (with(&labels, "cause", cause), tokens))
        });
        page.counter(
            "switchpoint_missed_tokens",
            "Tokens of prompts that the engine had not cached, by cause.",
            missed,
        )?;
        let sums: [(&str, &str, ModelSum); 5] = [
            ("llm_d_epp_request_size_bytes", "Request bodies.", |m| {
                m.request_bytes
            }),
            ("llm_d_epp_response_size_bytes", "Response bodies.", |m| {
                m.response_bytes
            }),
            (
                "llm_d_epp_request_input_tokens",
                "Tokens of prompts.",
                |m| m.prompt_tokens,
            ),
            (
                "llm_d_epp_request_output_tokens",
                "Tokens generated.",
                |m| m.completion_tokens,
            ),
            (
                "llm_d_epp_request_cached_tokens",
                "Tokens of prompts that the engine had cached.",
                |m| m.cached_tokens,
            ),
        ];
        for (name, help, of) in sums {
            page.histogram(
                name,
                help,
                rows().map(|(labels, m)| (labels, HistogramBuckets::sum_only(of(m), m.requests))),
            )?;
        }
        Ok(())
    }

    /// The age of the data of discovery. During an outage of its backend the last known set stays
    /// in force, and the age grows.
    fn discovery(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let discovery = &self.shown.discovery;
        let components = discovery.components.iter();
        let all: Vec<(MetricLabels, BackendStatus)> = components
            .flat_map(|(pool, components)| {
                let labels =
                    |name: &String| vec![("pool", pool.to_string()), ("component", name.clone())];
                components
                    .iter()
                    .map(move |(name, followed)| (labels(name), followed.status().borrow().clone()))
            })
            .collect();
        let age = |status: &BackendStatus| {
            status
                .last_contact
                .and_then(|at| at.elapsed().ok())
                .map(|age| age.as_secs_f64())
        };
        let ages = all
            .iter()
            .filter_map(|(labels, status)| Some((labels.clone(), age(status)?)));
        page.gauge(
            "switchpoint_discovery_age_seconds",
            "Time since the last contact with the backend of a component.",
            ages,
        )?;
        let others = all.iter().filter_map(|(labels, status)| {
            Some((
                labels.clone(),
                flag(status.requirements.as_ref()?.protocol != discovery.cluster_protocol),
            ))
        });
        page.gauge(
            "switchpoint_protocol_mismatch",
            "1 if the InferencePool's servers use another protocol than the pool's cluster.",
            others,
        )?;
        let connected = all.iter().map(|(labels, status)| {
            (
                labels.clone(),
                flag(status.synced && status.error.is_none()),
            )
        });
        page.gauge(
            "switchpoint_discovery_connected",
            "0 while the backend of a component cannot be reached or read.",
            connected,
        )
    }

    fn pools(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let columns: [(&str, &str, EndpointGauge); 3] = [
            (
                "kv_cache_utilization",
                "KV-cache utilization, 0 to 1",
                |m| m.kv_cache_utilization,
            ),
            ("queue_size", "requests waiting in the engines", |m| {
                m.queue_depth
            }),
            ("running_requests", "requests running in the engines", |m| {
                m.running_requests
            }),
        ];
        for (name, help, of) in columns {
            let moments = || {
                self.pools.iter().filter_map(|pool| {
                    Some((
                        name_label(pool),
                        moments(pool.view.metrics.iter().filter_map(of))?,
                    ))
                })
            };
            page.gauge(
                &format!("llm_d_epp_average_{name}"),
                &format!("Mean over endpoints: {help}."),
                moments().map(|(l, (mean, _))| (l, mean)),
            )?;
            page.gauge(
                &format!("llm_d_epp_std_dev_{name}"),
                &format!("Standard deviation over endpoints: {help}."),
                moments().map(|(l, (_, deviation))| (l, deviation)),
            )?;
        }
        let ready = self
            .pools
            .iter()
            .map(|pool| (name_label(pool), count(pool.view.members.len())));
        page.gauge(
            "llm_d_epp_ready_endpoints",
            "Endpoints that may be picked.",
            ready,
        )?;
        let unconfirmed = |pool: &PoolCounts| {
            pool.view
                .members
                .iter()
                .filter(|m| m.instance.unconfirmed.is_some())
                .count()
        };
        page.gauge(
            "switchpoint_endpoints_unconfirmed",
            "Endpoints that discovery reports as not ready, kept because they answer their scrapes.",
            self.pools.iter().map(|pool| (pool_label(pool), count(unconfirmed(pool)))),
        )?;
        let queues = self.pools.iter().flat_map(|pool| {
            pool.view
                .members
                .iter()
                .zip(pool.view.metrics.iter())
                .filter_map(|(member, metrics)| {
                    let labels = with(
                        &name_label(pool),
                        "model_server_endpoint",
                        &member.instance.name,
                    );
                    Some((labels, f64::from(metrics.queue_depth?)))
                })
        });
        page.gauge(
            "llm_d_epp_per_endpoint_queue_size",
            "Requests waiting in an engine.",
            queues,
        )
    }

    fn scheduler(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let picks = self.pools.iter().map(|pool| {
            (
                pool_label(pool),
                HistogramBuckets::scaled(&pool.totals.pick_us, 1e-6),
            )
        });
        page.histogram(
            "llm_d_epp_scheduler_e2e_duration_seconds",
            "Time of a pick.",
            picks,
        )?;
        let attempt = |status: &str, endpoint: &str, namespace: &str, port: &str| {
            vec![
                ("status", status.to_owned()),
                ("target_model_name", String::new()),
                ("endpoint_name", endpoint.to_owned()),
                ("namespace", namespace.to_owned()),
                ("port", port.to_owned()),
            ]
        };
        let attempts = self.pools.iter().flat_map(|pool| {
            let picked = pool.view.members.iter().map(move |m| {
                let port = m.instance.address.port().to_string();
                let labels = attempt("success", &m.instance.name, &m.instance.namespace, &port);
                (
                    with(&labels, "pool", &pool.view.name),
                    pool.endpoint(m.id).picked,
                )
            });
            let dropped = pool.totals.dropped.values().sum();
            picked
                .chain([(
                    with(&attempt("failure", "", "", ""), "pool", &pool.view.name),
                    dropped,
                )])
                .collect::<Vec<_>>()
        });
        page.counter(
            "llm_d_epp_scheduler_attempts",
            "Picks, by first endpoint of the ranked list.",
            attempts,
        )?;
        let plugin = |pool: &PoolCounts| {
            let plugin = ("plugin_type", "prefix-cache-scorer".to_owned());
            vec![
                ("pool", pool.view.name.to_string()),
                ("plugin_name", plugin.1.clone()),
                plugin,
            ]
        };
        let entries = self
            .pools
            .iter()
            .map(|pool| (plugin(pool), float(pool.totals.prefix_entries)));
        page.gauge(
            "llm_d_epp_prefix_indexer_size",
            "Entries of the fullest prefix index.",
            entries,
        )?;
        let evictions = self
            .pools
            .iter()
            .map(|pool| (pool_label(pool), pool.totals.prefix_evictions));
        page.counter(
            "switchpoint_prefix_evictions",
            "Entries evicted from prefix indexes.",
            evictions,
        )?;
        let dropped = self.pools.iter().flat_map(|pool| {
            pool.totals
                .dropped
                .iter()
                .map(move |(reason, count)| (with(&pool_label(pool), "reason", reason), *count))
        });
        page.counter(
            "switchpoint_requests_dropped",
            "Requests refused by the filters, by reason.",
            dropped,
        )
    }

    fn endpoints(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let rows = || {
            self.pools.iter().flat_map(|pool| {
                pool.view.members.iter().map(move |m| {
                    let labels = vec![
                        ("pool", pool.view.name.to_string()),
                        ("endpoint_name", m.instance.name.clone()),
                        ("namespace", m.instance.namespace.clone()),
                        ("producer_name", "inflight-load-producer".to_owned()),
                    ];
                    (labels, pool.endpoint(m.id))
                })
            })
        };
        page.gauge(
            "llm_d_epp_inflight_requests",
            "Requests outstanding at an endpoint.",
            rows().map(|(l, e)| (l, float(e.requests))),
        )?;
        let tokens =
            rows().map(|(l, e)| (l, float(e.prefill_tokens.saturating_add(e.decode_tokens))));
        page.gauge(
            "llm_d_epp_inflight_tokens",
            "Tokens outstanding at an endpoint.",
            tokens,
        )?;
        let bare = |mut labels: MetricLabels| {
            labels.pop();
            labels
        };
        page.counter(
            "switchpoint_endpoint_served",
            "Requests an endpoint answered.",
            rows().map(|(l, e)| (bare(l), e.served)),
        )?;
        page.counter(
            "switchpoint_endpoint_failed",
            "Requests an endpoint refused or reset before a response.",
            rows().map(|(l, e)| (bare(l), e.failed)),
        )
    }

    fn scrapes(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let rows = || {
            self.pools
                .iter()
                .filter_map(|pool| Some((pool_label(pool), pool.scrapes.as_ref()?)))
        };
        let failures = rows()
            .map(|(_, s)| s.failures.iter().map(|(_, count)| count).sum::<u64>())
            .sum();
        let source = vec![("source_type", "metrics-data-source".to_owned())];
        page.counter(
            "llm_d_epp_datalayer_poll_errors",
            "Scrapes that failed.",
            [(source, failures)],
        )?;
        page.counter(
            "switchpoint_scrapes",
            "Scrapes.",
            rows().map(|(l, s)| (l, s.polls)),
        )?;
        let by_reason = rows().flat_map(|(l, s)| {
            s.failures
                .iter()
                .map(move |(reason, count)| (with(&l, "reason", reason), *count))
        });
        page.counter(
            "switchpoint_scrape_failures",
            "Scrapes that failed, by reason.",
            by_reason,
        )?;
        let pages = rows().flat_map(|(l, s)| {
            [("filtered", s.pages_filtered), ("whole", s.full_pages)]
                .map(|(kind, count)| (with(&l, "kind", kind), count))
        });
        page.counter(
            "switchpoint_scrape_pages",
            "Pages requested: filtered (needed families only) or whole.",
            pages,
        )?;
        page.counter(
            "switchpoint_scrape_bytes",
            "Bytes of pages read.",
            rows().map(|(l, s)| (l, s.bytes)),
        )?;
        page.counter(
            "switchpoint_scrape_lines_skipped",
            "Lines that could not be read.",
            rows().map(|(l, s)| (l, s.lines_skipped)),
        )?;
        page.counter(
            "switchpoint_endpoint_restarts",
            "Restarts of engines.",
            rows().map(|(l, s)| (l, s.restarts)),
        )?;
        let durations = rows().map(|(labels, s)| {
            let bounds = DURATION_BUCKETS_MS
                .iter()
                .map(|&ms| float(ms) / 1e3)
                .chain([f64::INFINITY]);
            (
                labels,
                HistogramBuckets {
                    counts: bounds.zip(s.duration_buckets.iter().copied()).collect(),
                    sum: float(s.duration_us) / 1e6,
                },
            )
        });
        page.histogram(
            "switchpoint_scrape_duration_seconds",
            "Time of a scrape, from the request to the end of the page.",
            durations,
        )
    }

    /// Predictions and outcomes of the same requests.
    fn compared(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let rows = || {
            self.pools
                .iter()
                .filter_map(|pool| Some((pool_label(pool), pool.learner.as_ref()?)))
                .flat_map(|(labels, p)| {
                    PredictedTarget::ALL.into_iter().zip(p.compared).map(
                        move |(target, compared)| {
                            (with(&labels, "target", target.name()), compared)
                        },
                    )
                })
        };
        let predicted =
            rows().map(|(labels, c)| (labels, HistogramBuckets::scaled(&c.predicted_ms, 1e-3)));
        page.histogram(
            "switchpoint_latency_predicted_seconds",
            "Predictions at the pick, of requests with a known outcome.",
            predicted,
        )?;
        let actual =
            rows().map(|(labels, c)| (labels, HistogramBuckets::scaled(&c.actual_ms, 1e-3)));
        page.histogram(
            "switchpoint_latency_actual_seconds",
            "Measured times of the same requests.",
            actual,
        )?;
        let ratios = rows().map(|(labels, c)| {
            let bounds = RATIO_BOUNDS.into_iter().chain([f64::INFINITY]);
            (
                labels,
                HistogramBuckets {
                    counts: bounds.zip(c.ratios).collect(),
                    sum: c.ratio_sum,
                },
            )
        });
        page.histogram(
            "switchpoint_latency_actual_to_predicted_ratio",
            "Measured time divided by predicted time.",
            ratios,
        )
    }

    fn latency(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let rows = || {
            self.pools
                .iter()
                .filter_map(|pool| Some((pool_label(pool), pool.learner.as_ref()?)))
        };
        let observations = rows().flat_map(|(l, p)| {
            p.counts
                .rows()
                .map(|(result, count)| (with(&l, "result", result), count))
        });
        page.counter(
            "switchpoint_latency_observations",
            "Observations of ended requests from proxies, by result.",
            observations,
        )?;
        let abstained = rows().flat_map(|(l, p)| {
            p.abstained
                .iter()
                .map(move |(reason, count)| (with(&l, "reason", reason), *count))
        });
        page.counter(
            "switchpoint_latency_abstentions",
            "Requests with a measured TTFT or TPOT and without a latency prediction, by reason.",
            abstained,
        )?;
        page.counter(
            "switchpoint_latency_models",
            "Models published to proxies.",
            rows().map(|(l, p)| (l, p.published)),
        )?;
        page.counter(
            "switchpoint_latency_models_oversized",
            "Models too large to publish.",
            rows().map(|(l, p)| (l, p.oversized)),
        )?;
        page.gauge(
            "switchpoint_latency_model_bytes",
            "Size of the last published model.",
            rows().map(|(l, p)| (l, count(p.bytes))),
        )?;
        page.gauge(
            "switchpoint_latency_predicts",
            "1 while there is a latency model.",
            rows().map(|(l, p)| (l, flag(p.predicts))),
        )?;
        // The empty endpoint name stands for the whole pool.
        let scores = || {
            rows().flat_map(|(labels, p)| {
                let endpoints = p
                    .endpoints
                    .iter()
                    .map(|(name, scores)| (name.as_str(), scores));
                let all = endpoints
                    .chain([("", &p.pool)])
                    .flat_map(move |(endpoint, scores)| {
                        let labels = with(&labels, "endpoint_name", endpoint);
                        PredictedTarget::ALL
                            .into_iter()
                            .zip(scores)
                            .map(move |(target, score)| {
                                (with(&labels, "target", target.name()), *score)
                            })
                    });
                all.collect::<Vec<_>>()
            })
        };
        let predicted = scores().map(|(labels, score)| (labels, score.count));
        page.counter(
            "switchpoint_latency_predictions",
            "Predictions compared with a measurement.",
            predicted,
        )?;
        let gauges: [LatencyGauge; 3] = [
            (
                "switchpoint_latency_mape",
                "Mean absolute error of the newest predictions, relative to the measurement.",
                |s| s.mape,
            ),
            (
                "switchpoint_latency_pinball90_milliseconds",
                "Pinball loss at 0.9 of the newest predictions.",
                |s| s.pinball90_ms,
            ),
            (
                "switchpoint_latency_coverage90",
                "Share of the newest requests that took no longer than the predicted P90.",
                |s| s.coverage90,
            ),
        ];
        for (name, help, of) in gauges {
            page.gauge(
                name,
                help,
                scores()
                    .filter(|(_, score)| score.recent > 0)
                    .map(|(labels, score)| (labels, of(&score))),
            )?;
        }
        self.compared(page)
    }

    fn configs(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let rows = || {
            self.pools
                .iter()
                .map(|p| (pool_label(p), &p.view.sources.config))
                .filter(|(_, config)| config.file.is_some())
        };
        let taken = rows().map(|(labels, config)| (labels, flag(config.error.is_none())));
        page.gauge(
            "switchpoint_config_last_reload_successful",
            "0 while the newest content of the file cannot be used.",
            taken,
        )?;
        let seconds = |at: SystemTime| {
            at.duration_since(SystemTime::UNIX_EPOCH)
                .unwrap_or_default()
                .as_secs_f64()
        };
        let at = rows().map(|(labels, config)| (labels, seconds(config.taken_at)));
        page.gauge(
            "switchpoint_config_last_reload_success_timestamp_seconds",
            "When content of the file was last applied.",
            at,
        )?;
        let outcomes = rows().flat_map(|(labels, config)| {
            [("success", config.taken), ("failure", config.refused)]
                .map(|(result, count)| (with(&labels, "result", result), count))
        });
        page.counter(
            "switchpoint_config_reloads",
            "Reloads of the file, by result; the start counts as the first.",
            outcomes,
        )
    }

    fn relayed(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let relayed: Vec<u64> = self
            .pools
            .iter()
            .map(|p| self.shown.shared.proxies.relay().dropped(&p.view.name))
            .collect();
        let untold = |(p, relayed): (&PoolCounts, u64)| {
            (
                pool_label(p),
                p.totals.placements_dropped.saturating_add(relayed),
            )
        };
        let dropped: Vec<(MetricLabels, u64)> =
            self.pools.iter().zip(relayed).map(untold).collect();
        page.counter(
            "switchpoint_placements_dropped",
            "Placements that were not shared with other workers because there were too many.",
            dropped,
        )
    }

    /// Metrics of the connected proxies and Envoys.
    fn peers(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let proxies = self.shown.shared.proxies.streams.borrow().clone();
        let eds = self.shown.shared.proxies.eds.borrow().clone();
        let per_pool = |of: &dyn Fn(&PoolCounts) -> f64| {
            self.pools
                .iter()
                .map(|p| (pool_label(p), of(p)))
                .collect::<Vec<_>>()
        };
        let asks = |p: &PoolCounts| {
            count(
                proxies
                    .values()
                    .filter(|proxy| proxy.pools.contains_key(&*p.view.name))
                    .count(),
            )
        };
        page.gauge(
            "switchpoint_proxies",
            "State streams open.",
            per_pool(&asks),
        )?;
        let streams = |p: &PoolCounts| {
            count(
                eds.open
                    .values()
                    .filter(|s| s.pools.contains_key(&*p.view.name))
                    .count(),
            )
        };
        page.gauge(
            "switchpoint_eds_streams",
            "EDS streams open.",
            per_pool(&streams),
        )?;
        let late = |p: &PoolCounts| {
            count(
                eds.open
                    .values()
                    .filter_map(|s| s.pools.get(&*p.view.name))
                    .filter(|ack| ack.late)
                    .count(),
            )
        };
        page.gauge(
            "switchpoint_eds_streams_unanswered",
            "EDS streams whose Envoy does not apply its responses: pool updates no longer wait for it.",
            per_pool(&late),
        )?;
        let has_no_eds = |proxy: &&ConnectedProxy, pool: &str| {
            proxy.pools.contains_key(pool)
                && eds.of(&proxy.peer, pool, Instant::now()) == ProxyEds::None
        };
        let without = |p: &PoolCounts| {
            count(
                proxies
                    .values()
                    .filter(|proxy| has_no_eds(proxy, &p.view.name))
                    .count(),
            )
        };
        page.gauge(
            "switchpoint_proxies_without_eds",
            "Proxies whose Envoy has no EDS stream here: its hosts come from elsewhere, perhaps from another daemon.",
            per_pool(&without),
        )?;
        let withheld = |p: &PoolCounts| {
            count(
                proxies
                    .values()
                    .filter_map(|proxy| Some(proxy.pools.get(&*p.view.name)?.withheld))
                    .sum(),
            )
        };
        page.gauge(
            "switchpoint_endpoints_withheld",
            "Endpoints withheld from proxies whose Envoy does not have them yet.",
            per_pool(&withheld),
        )?;
        let refused = self
            .shown
            .shared
            .proxies
            .origins
            .refused()
            .map(|(kind, count)| (vec![("kind", kind.name().to_owned())], count));
        page.counter(
            "switchpoint_streams_refused",
            "Streams and calls refused because there were too many.",
            refused,
        )
    }

    fn leadership(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let leads = flag(self.shown.shared.life.leads());
        let term = float(self.shown.shared.life.term());
        page.gauge(
            "switchpoint_leads",
            "1 while the daemon leads, 0 while it stands by.",
            [(MetricLabels::new(), leads)],
        )?;
        let help = "The newest term that the daemon knows: its own while it leads.";
        page.gauge("switchpoint_term", help, [(MetricLabels::new(), term)])
    }

    fn daemon(&self, page: &mut MetricsPage<'_>) -> fmt::Result {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let commit = COMMIT.to_owned();
        let release = vec![("commit", commit.clone()), ("build_ref", version.clone())];
        page.gauge("llm_d_epp_info", "The build.", [(release, 1.0)])?;
        let build = vec![("version", version), ("commit", commit)];
        page.gauge(
            "switchpoint_build_info",
            "The version and the commit of the daemon.",
            [(build, 1.0)],
        )?;
        self.leadership(page)?;
        self.ext_proc(page)?;
        self.peers(page)?;
        let per_pool = |of: &dyn Fn(&PoolCounts) -> f64| {
            self.pools
                .iter()
                .map(|p| (pool_label(p), of(p)))
                .collect::<Vec<_>>()
        };
        page.gauge(
            "switchpoint_pool_revision",
            "Grows with every change of a pool.",
            per_pool(&|p| float(p.view.revision)),
        )?;
        page.gauge(
            "switchpoint_vms",
            "Filter VMs that reported lately.",
            per_pool(&|p| float(p.totals.vms)),
        )?;
        page.gauge(
            "switchpoint_pool_complete",
            "1 once a pool has a complete set of endpoints.",
            per_pool(&|p| flag(p.view.sources.complete)),
        )?;
        let sources = self.pools.iter().flat_map(|p| {
            let sources = &p.view.sources;
            let ok = [
                ("discovery", sources.discovery_error.is_none()),
                ("config", sources.config.error.is_none()),
                ("objects", sources.objects.error.is_none()),
            ];
            ok.map(|(source, ok)| (with(&pool_label(p), "source", source), flag(ok)))
        });
        page.gauge(
            "switchpoint_source_ok",
            "0 while the newest content of a source cannot be used; the last one stays.",
            sources,
        )?;
        let errors = self
            .pools
            .iter()
            .map(|p| (pool_label(p), p.view.sources.errors));
        page.counter(
            "switchpoint_source_errors",
            "Contents of sources that could not be used.",
            errors,
        )?;
        let without_pool =
            |p: &PoolCounts| count(p.view.sources.objects_without_pool.values().sum());
        page.gauge(
            "switchpoint_objects_without_pool",
            "Objects that name no pool of this daemon.",
            per_pool(&without_pool),
        )?;
        self.discovery(page)?;
        self.configs(page)?;
        let plain = {
            let c = self.shown.shared.reports.counters();
            [
                (
                    "switchpoint_pool_updates_refused",
                    "Pool updates that a proxy refused.",
                    c.pool_updates_refused,
                ),
                (
                    "switchpoint_eds_refused",
                    "EDS responses that an Envoy refused.",
                    c.eds_refused,
                ),
                ("switchpoint_reports", "Reports of proxies.", c.reports),
                (
                    "switchpoint_reports_invalid",
                    "Parts of reports that could not be read, or named a pool that the proxy does not have.",
                    c.reports_invalid,
                ),
                (
                    "switchpoint_peer_messages_refused",
                    "Other messages of proxies that were too large, or named a pool that the proxy does not have.",
                    c.messages_refused,
                ),
                (
                    "switchpoint_eds_unanswered",
                    "EDS responses that an Envoy did not apply in time.",
                    c.eds_unanswered,
                ),
                (
                    "switchpoint_snapshot_write_errors",
                    "Writes of the snapshot file that failed.",
                    c.snapshot_write_errors,
                ),
            ]
        };
        for (name, help, value) in plain {
            page.counter(name, help, [(MetricLabels::new(), value)])?;
        }
        let age = self
            .shown
            .snapshot
            .as_ref()
            .map(|file| file.written_unix_ms())
            .map(|written| {
                let now = SystemTime::now()
                    .duration_since(SystemTime::UNIX_EPOCH)
                    .unwrap_or_default();
                (
                    MetricLabels::new(),
                    (now.as_secs_f64() - float(written) / 1e3).max(0.0),
                )
            });
        page.gauge(
            "switchpoint_snapshot_age_seconds",
            "Time since the snapshot file was written; it is written on change.",
            age,
        )
    }
}

// === impl PoolCounts ===

impl PoolCounts {
    fn endpoint(&self, id: scheduler::EndpointRef) -> crate::state::counters::EndpointTotals {
        self.totals
            .endpoints
            .get(&(id.generation, id.slot))
            .copied()
            .unwrap_or_default()
    }
}

fn pool_label(pool: &PoolCounts) -> MetricLabels {
    vec![("pool", pool.view.name.to_string())]
}

/// llm-d names the label of its pool metrics `name`.
fn name_label(pool: &PoolCounts) -> MetricLabels {
    vec![("name", pool.view.name.to_string())]
}
