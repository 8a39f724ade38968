//! Reads a body, and applies the pool's objects to the request.

use scheduler::objects::ModelRequest;

use super::pending_request::{self, ParsedBody, PendingRequest, PromptFacts};
use super::slo::RequestedSlo;
use super::{Exchange, ExchangeStep};
use crate::api::RequestApi;
use crate::body::{self, BodyError, BodyReader, ParsedRequest};
use crate::prompt::{HashSettings, PromptSums};
use crate::reply::Refusal;
use crate::rewrite::{self, BodyEdit};
use crate::settings::{ExchangeSettings, HeaderTrust};
use pool_state::{ManagedPool, Timestamp};
use scheduler::Snapshot;

/// The number of bytes of a form that count as one byte of text. At 32 kbit/s, speech has 4,000
/// bytes a second, which an encoder turns into 50 tokens. So speech has 80 bytes per token, and
/// text has four.
const FORM_BYTES: usize = 20;

impl Exchange {
    /// The first step of [`Self::decide`]: reads the body, and sums its prompt with these settings
    /// of the pool.
    #[must_use]
    #[inline(never)] // several callers, and the wasm module should be small
    pub fn read(&self, body: &[u8], hashing: Option<HashSettings>) -> ParsedBody {
        let read = |body| {
            self.begin_body(hashing)
                .finish(body::unwrapped(self.api, body)?)
        };
        // A task may have no body: `POST /v1/responses/ID/cancel`.
        let reads = self.reads_body() && !(self.api == RequestApi::Task && body.is_empty());
        ParsedBody {
            parsed: reads.then(|| read(body).map_err(Refusal::Body)).transpose(),
            body_bytes: body.len(),
        }
    }

    /// Begins to read a body that comes in pieces. `None` if the body is not read, or is read only
    /// when it is complete.
    #[must_use]
    pub fn reader(&self, hashing: HashSettings) -> Option<BodyReader<PromptSums>> {
        (self.reads_body() && !self.api.is_grpc()).then(|| self.begin_body(Some(hashing)))
    }

    #[inline(never)] // several callers, and the wasm module should be small
    fn begin_body(&self, hashing: Option<HashSettings>) -> BodyReader<PromptSums> {
        let reader = BodyReader::new(self.api, PromptSums::new(hashing));
        match &self.facts.boundary {
            Some(boundary) => reader.with_boundary(boundary),
            None => reader,
        }
    }

    /// The second step of [`Self::decide`]: applies the pool's objects.
    ///
    /// # Errors
    /// Returns the step that follows at once: refuse the request, or wait for the pool's first
    /// state.
    #[inline(never)] // several callers, and the wasm module should be small
    pub fn resolve(
        &mut self,
        settings: &ExchangeSettings,
        pool: &mut ManagedPool,
        read: ParsedBody,
        now: Timestamp,
    ) -> Result<PendingRequest, ExchangeStep> {
        let _ = self.end(pool, now); // a host that decides twice must not leak the first pick
        let ParsedBody { parsed, body_bytes } = read;
        let mut parsed = parsed.map_err(|refusal| self.body_refused(pool, refusal))?;
        let Some((prefix, token)) = pool.prompt_settings() else {
            return Err(self.without_state(settings, pool, now));
        };
        let latency = self
            .requested_slo(settings, pool)
            .map_err(|refusal| self.refuse(pool, &refusal))?;
        let unseen = self.unseen && self.api.reads_body();
        let named = self.facts.model.as_deref().filter(|_| unseen);
        let named = named.map(str::to_owned);
        let model = parsed
            .as_ref()
            .map(|parsed| parsed.model.as_str())
            .or(named.as_deref())
            .unwrap_or_default();
        let resolved = pool
            .resolve(self.requested_model(model))
            .map_err(|refusal| self.refuse(pool, &refusal.into()))?;
        let target = resolved.target_model;
        let is_form = self.facts.boundary.is_some();
        let stored_id = parsed.as_ref().map(|parsed| parsed.stored_id);
        let stored_id = stored_id.filter(|id| *id != 0);
        let (splice, names) = parsed
            .as_ref()
            .zip(target.as_deref())
            .and_then(|(p, target)| rewrite::model(p, target, is_form))
            .unzip();
        let target = target.filter(|_| splice.is_some());
        let salt = parsed.as_mut().and_then(|p| self.salt(settings, p));
        let model = parsed
            .as_mut()
            .map(|parsed| std::mem::take(&mut parsed.model))
            .or(named)
            .unwrap_or_default();
        // A client may declare any length, so limit it. The load of endpoints does not include it
        // before the body has arrived.
        let is_unread = unseen || !self.api.reads_body();
        let declared = self.facts.declared_bytes.filter(|_| is_unread).unwrap_or(0);
        let unseen_bytes = declared.min(settings.body_limit_bytes);
        let prompt_tokens = if self.api == RequestApi::Task && !unseen {
            self.task_tokens(pool, body_bytes)
        } else {
            pending_request::tokens(parsed.as_ref(), unseen_bytes, token, pool)
        };
        Ok(PendingRequest {
            prompt_tokens,
            parsed,
            body_bytes: if unseen { unseen_bytes } else { body_bytes },
            model,
            target,
            splice: BodyEdit::join(splice, salt),
            names,
            priority: resolved.priority,
            latency,
            prefix,
            blocks: Vec::new(),
            facts: PromptFacts::default(),
            stored_id: stored_id.unwrap_or(self.facts.stored_id),
            client: self.facts.client.hash,
        })
    }

    fn requested_model<'m>(&'m self, model: &'m str) -> ModelRequest<'m> {
        ModelRequest {
            model,
            objective: self.facts.objective.as_deref(),
            rewrite: self.facts.rewrite.as_deref(),
        }
    }

    /// The tokens of a body whose prompt is not read.
    fn task_tokens(&self, pool: &ManagedPool, body_bytes: usize) -> u32 {
        let is_form = self.facts.boundary.is_some();
        pool.text_tokens(body_bytes / if is_form { FORM_BYTES } else { 1 })
    }

    /// Separates the client's cached prefixes from those of other clients, if the settings say so.
    fn salt(
        &self,
        settings: &ExchangeSettings,
        parsed: &mut ParsedRequest<PromptSums>,
    ) -> Option<BodyEdit> {
        let is_json = self.facts.boundary.is_none() && !self.api.is_grpc();
        if !settings.separates_caches() || !is_json {
            return None;
        }
        let tenant = &self.facts.client.tenant;
        let salt = scheduler::prefix::keyed_name(&settings.cache_salt_key, tenant);
        let edit = rewrite::salt(parsed, self.api, &salt);
        parsed.cache_salt = salt.into_bytes();
        edit
    }

    /// Returns the SLOs of the request. There are none if the pool does not predict latency, if the
    /// path is not an inference path, or if the headers are not trusted.
    fn requested_slo(
        &self,
        settings: &ExchangeSettings,
        pool: &ManagedPool,
    ) -> Result<RequestedSlo, Refusal> {
        let predicting = pool
            .snapshot()
            .map(Snapshot::pipeline)
            .filter(|pipeline| pipeline.predicts() && self.api.is_inference());
        let Some(pipeline) = predicting else {
            return Ok(RequestedSlo::default());
        };
        let requested = self.facts.latency?;
        let is_trusted = settings.slo_headers == HeaderTrust::Trust;
        if is_trusted && pipeline.demands_slo() && !requested.slo.any() {
            Err(Refusal::SloMissing)
        } else {
            Ok(requested)
        }
    }

    /// Refuses a body that cannot be read. If the body is neither JSON nor a form but is encoded,
    /// the reply names the encoding.
    fn body_refused(&mut self, pool: &mut ManagedPool, refusal: Refusal) -> ExchangeStep {
        let is_read = !matches!(
            refusal,
            Refusal::Body(BodyError::InvalidJson { .. } | BodyError::InvalidForm(_))
        );
        let refusal = self
            .facts
            .encoding
            .take()
            .filter(|_| !is_read)
            .map_or(refusal, Refusal::Encoded);
        self.refuse(pool, &refusal)
    }

    /// Whether the body has an effect on the decision.
    pub(super) fn reads_body(&self) -> bool {
        !self.unseen && self.api.reads_body()
    }
}
