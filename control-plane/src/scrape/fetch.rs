//! One scrape over HTTP. The scrape requests only the metric families that the daemon needs, falls
//! back to the whole page, and limits the number of bytes that it reads.
//!
//! ```text
//!            families come back                     families come back
//!  Filtered ───────────────────▶ Filtered    Whole ───────────────────▶ Whole, read up to the last family the page has
//!     │  some are missing: the whole page, at once    │ after FILTER_RETRY
//!     │  has it more? ──▶ Whole                       └──▶ Filtered
//!     └─ no: they do not exist, and the filter stays
//! ```
//! The filter (`name[]` in the query) saves more work at the engine than at the daemon. Writing a
//! whole page costs the engine's API server fifty times the CPU time of the needed families. A
//! restart of the engine resets this state. `prometheus_client` in multi-process mode (SGLang, or
//! vLLM with several API servers) returns an empty answer to a filter. `Whole` exists for such
//! servers. Redirects are not followed, and proxies from the environment are not used, so the page
//! comes from the endpoint itself.

use std::sync::Arc;
use std::time::Duration;

use reqwest::header::{ACCEPT, CONTENT_ENCODING, HeaderValue};
use reqwest::{Client, Response, StatusCode, Url};
use tokio::time::{Instant, timeout};

use super::engine::FamilySet;
use super::engine_models::{MODELS_BYTES_MAX, MODELS_DEADLINE};
use super::exposition::{ExpositionParser, ParseProgress};
use super::extract::{Extraction, PageReading};
use super::http_client;
use super::stats::ScrapeStats;
use super::target::ScrapeTarget;

/// The maximum number of bytes of one page. An engine's page has 40-200 KB and grows with label
/// values. A page a hundred times as large is an error of the endpoint, and reading it would only
/// waste memory bandwidth (nothing is stored).
pub const PAGE_BYTES_MAX: usize = 8 * 1024 * 1024;

/// The maximum length of the rest of a page, after the last wanted family, that is still read.
/// Reading that much to keep the connection is cheaper than a new TCP connection.
const DRAIN_BYTES_MAX: usize = 64 * 1024;

/// The time after a whole page was read to its end, during which readings stop at the last wanted
/// family that the page had. After this time, a page is read to its end again, because a family may
/// appear late, for example LoRA with its first use.
const RELEARN_AFTER: Duration = Duration::from_secs(10);

/// The time after which a filtered answer is requested again from an endpoint that ignored the
/// filter. The proxy in front of the endpoint, or its configuration, may have changed.
const FILTER_RETRY: Duration = Duration::from_secs(300);

/// The maximum number of bytes of an error's text that are kept for the log.
const DETAIL_BYTES_MAX: usize = 200;

/// The accepted format: the text format only. OpenMetrics costs the engine more to write, and has
/// no further content that is needed.
const ACCEPTED: HeaderValue = HeaderValue::from_static("text/plain;version=0.0.4");

/// The reason why a scrape failed. The cause is the endpoint or the network. The scraper tries
/// again by itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FailReason {
    /// The answer was not complete by the deadline.
    #[error("no complete answer in time")]
    Timeout,
    /// The scraper got no connection, or no TLS session.
    #[error("cannot connect: {0}")]
    Connect(Box<str>),
    /// The answer is a redirect, which the scraper does not follow.
    #[error("answered {0}, and redirects are not followed")]
    Redirect(u16),
    /// The answer has a status other than 200.
    #[error("answered {0}")]
    Status(u16),
    /// The answer is compressed, although the request did not allow compression.
    #[error("answered in a content encoding that was not requested")]
    Encoding,
    /// The page is longer than [`PAGE_BYTES_MAX`].
    #[error("page longer than {PAGE_BYTES_MAX} bytes")]
    TooLarge,
    /// The connection ended in the middle of the answer, or the answer was not HTTP.
    #[error("answer broke off: {0}")]
    Broken(Box<str>),
    /// The page has no load metric of the engine.
    #[error("no load metric of the engine on the page: is the engine label correct?")]
    NoMetrics,
}

/// The way to request metrics from an endpoint, learned from the endpoint's answers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FetchHabit {
    /// The time when the scraper began to request the whole page. `None` means that the scraper
    /// requests filtered answers.
    full_page_since: Option<Instant>,
    /// The families on the endpoint's last complete page or filtered answer; `None` before the
    /// first page.
    settled: Option<FamilySet>,
    /// The time when a whole page was last read to its end.
    learned_at: Option<Instant>,
}

/// The result of a scrape.
#[derive(Debug)]
pub(super) struct ScrapedPage {
    pub(super) reading: PageReading,
    /// The time when the answer began to arrive. The engine wrote the page just before.
    pub(super) observed_at: Instant,
    pub(super) habit: FetchHabit,
}

/// Fetches pages from endpoints.
#[derive(Clone, Debug)]
pub(super) struct PageFetcher {
    pub(super) client: Client,
    pub(super) stats: Arc<ScrapeStats>,
}

struct FetchedPage {
    reading: PageReading,
    observed_at: Instant,
    /// Whether the whole page was read.
    complete: bool,
}

impl FailReason {
    /// All kinds of failure, as label values of a metric.
    pub const KINDS: [&'static str; 8] = [
        "timeout",
        "connect",
        "redirect",
        "status",
        "encoding",
        "too_large",
        "broken",
        "no_metrics",
    ];

    /// Returns the short name of the kind of failure, as in metrics.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::Connect(_) => "connect",
            Self::Redirect(_) => "redirect",
            Self::Status(_) => "status",
            Self::Encoding => "encoding",
            Self::TooLarge => "too_large",
            Self::Broken(_) => "broken",
            Self::NoMetrics => "no_metrics",
        }
    }
}

impl PageFetcher {
    /// Makes one scrape. The caller limits the duration of a scrape.
    pub(super) async fn scrape(
        &self,
        target: &ScrapeTarget,
        habit: FetchHabit,
    ) -> Result<ScrapedPage, FailReason> {
        let whole = habit
            .full_page_since
            .is_some_and(|since| since.elapsed() < FILTER_RETRY);
        let (page, habit) = if whole {
            self.fetch_full_page(target, habit).await?
        } else {
            self.filtered(target, habit).await?
        };
        if !page.reading.says_load() {
            return Err(FailReason::NoMetrics);
        }
        Ok(ScrapedPage {
            reading: page.reading,
            observed_at: page.observed_at,
            habit,
        })
    }

    async fn filtered(
        &self,
        target: &ScrapeTarget,
        habit: FetchHabit,
    ) -> Result<(FetchedPage, FetchHabit), FailReason> {
        let engine = &target.engine;
        self.stats.count_request(true);
        let present = match self
            .page(target.url.filtered(engine), Extraction::full_page(engine))
            .await
        {
            Ok(page) => {
                let lacks = match habit.settled {
                    None => page.reading.lacks_load(engine),
                    Some(settled) => {
                        settled & !page.reading.present != 0 || !page.reading.says_load()
                    }
                };
                if !lacks {
                    let settled = Some(page.reading.present);
                    return Ok((
                        page,
                        FetchHabit {
                            settled,
                            ..FetchHabit::default()
                        },
                    ));
                }
                page.reading.present
            }
            Err(FailReason::Status(400..=499)) => 0, // a server that refuses queries
            Err(reason) => return Err(reason),
        };
        let (page, learned) = self.fetch_full_page(target, FetchHabit::default()).await?;
        let honoured = page.reading.present & !present == 0;
        let whole_since = (!honoured).then(Instant::now);
        Ok((
            page,
            FetchHabit {
                full_page_since: whole_since,
                ..learned
            },
        ))
    }

    async fn fetch_full_page(
        &self,
        target: &ScrapeTarget,
        habit: FetchHabit,
    ) -> Result<(FetchedPage, FetchHabit), FailReason> {
        let fresh = habit
            .learned_at
            .is_some_and(|at| at.elapsed() < RELEARN_AFTER);
        let until = habit.settled.filter(|_| fresh);
        self.stats.count_request(false);
        let page = self
            .page(
                target.url.full_page(),
                Extraction::new(&target.engine, until),
            )
            .await?;
        let habit = match page.complete {
            true => FetchHabit {
                settled: Some(page.reading.present),
                learned_at: Some(Instant::now()),
                ..habit
            },
            false => habit,
        };
        Ok((page, habit))
    }

    /// Reads the engine's list of models. Returns `None` for an engine that has no such list, or
    /// requires a key for the list.
    pub(super) async fn models_list(&self, target: &ScrapeTarget) -> Option<Vec<u8>> {
        timeout(MODELS_DEADLINE, self.whole_models_list(target))
            .await
            .ok()
            .flatten()
    }

    async fn whole_models_list(&self, target: &ScrapeTarget) -> Option<Vec<u8>> {
        let response = self.client.get(target.url.models()).send().await.ok()?;
        check(&response).ok()?;
        http_client::body(response, MODELS_BYTES_MAX).await.ok()?
    }

    async fn page(
        &self,
        url: Url,
        mut extraction: Extraction<'_>,
    ) -> Result<FetchedPage, FailReason> {
        let mut response = self
            .client
            .get(url)
            .header(ACCEPT, ACCEPTED)
            .send()
            .await
            .map_err(|error| failure(&error))?;
        let observed_at = Instant::now();
        check(&response)?;
        let mut parser = ExpositionParser::default();
        let mut bytes = 0usize;
        let mut drained = 0usize;
        let mut progress = ParseProgress::More;
        let outcome = loop {
            match response.chunk().await {
                Ok(Some(chunk)) if progress == ParseProgress::More => {
                    bytes += chunk.len();
                    if bytes > PAGE_BYTES_MAX {
                        break Err(FailReason::TooLarge);
                    }
                    progress = parser.feed(&chunk, &mut extraction);
                }
                Ok(Some(chunk)) if drained + chunk.len() <= DRAIN_BYTES_MAX => {
                    drained += chunk.len();
                }
                Err(error) if progress == ParseProgress::More => break Err(failure(&error)),
                _ => break Ok(()),
            }
        };
        let lines = parser.finish(&mut extraction);
        self.stats.page(bytes + drained, lines);
        outcome?;
        Ok(FetchedPage {
            reading: extraction.finish(),
            observed_at,
            complete: progress == ParseProgress::More,
        })
    }
}

fn check(response: &Response) -> Result<(), FailReason> {
    let status = response.status();
    if status.is_redirection() {
        return Err(FailReason::Redirect(status.as_u16()));
    }
    if status != StatusCode::OK {
        return Err(FailReason::Status(status.as_u16()));
    }
    if response
        .headers()
        .get(CONTENT_ENCODING)
        .is_some_and(|encoding| encoding != "identity")
    {
        return Err(FailReason::Encoding);
    }
    if response
        .content_length()
        .is_some_and(|length| length > PAGE_BYTES_MAX as u64)
    {
        return Err(FailReason::TooLarge);
    }
    Ok(())
}

fn failure(error: &reqwest::Error) -> FailReason {
    if error.is_timeout() {
        return FailReason::Timeout;
    }
    let mut detail = http_client::cause(error);
    detail.truncate(detail.floor_char_boundary(DETAIL_BYTES_MAX));
    if error.is_connect() {
        FailReason::Connect(detail.into())
    } else {
        FailReason::Broken(detail.into())
    }
}
