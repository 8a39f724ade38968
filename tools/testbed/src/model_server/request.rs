//! Reads inference requests. Every API family is reduced to prompts as bytes and a few limits.
//!
//! Prompts are rendered so that the next turn of a conversation, which includes the answer, extends
//! the bytes of the previous turn.

use http::StatusCode;
use serde_json::{Value, json};

use super::engine::FinishReason;
use super::text::{self, TOKEN_BYTES, TextRng};

/// The number of output tokens of a request to `/v1/completions` that sets no limit, as in vLLM.
/// For the other API families, the default is the rest of the context.
const COMPLETION_TOKENS_DEFAULT: u64 = 16;
/// The maximum of a request's number of prompts times `n`. A greater number is a mistake in a test.
const SEQUENCES_MAX: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ModelApi {
    Chat,
    Completions,
    Responses,
    Messages,
    CountTokens,
    Embeddings,
}

impl ModelApi {
    pub(super) fn from_path(path: &str) -> Option<Self> {
        Some(match path {
            "/v1/chat/completions" => Self::Chat,
            "/v1/completions" => Self::Completions,
            "/v1/responses" => Self::Responses,
            "/v1/messages" => Self::Messages,
            "/v1/messages/count_tokens" => Self::CountTokens,
            "/v1/embeddings" => Self::Embeddings,
            _ => return None,
        })
    }

    fn is_anthropic(self) -> bool {
        matches!(self, Self::Messages | Self::CountTokens)
    }

    /// Returns the names of the request fields that limit the output.
    fn max_tokens_keys(self) -> &'static [&'static str] {
        match self {
            Self::Chat => &["max_completion_tokens", "max_tokens"],
            Self::Responses => &["max_output_tokens"],
            _ => &["max_tokens"],
        }
    }
}

/// An error in the format of the API family.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ApiError {
    pub status: StatusCode,
    pub message: String,
    pub param: Option<&'static str>,
}

impl ApiError {
    pub(super) fn bad_request(message: impl Into<String>, param: Option<&'static str>) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            message: message.into(),
            param,
        }
    }

    pub(super) fn body(&self, api: ModelApi) -> Value {
        let Self {
            status,
            message,
            param,
        } = self;
        let (openai, anthropic) = match *status {
            StatusCode::NOT_FOUND => ("NotFoundError", "not_found_error"),
            StatusCode::BAD_REQUEST => ("BadRequestError", "invalid_request_error"),
            _ => ("InternalServerError", "api_error"),
        };
        if api.is_anthropic() {
            json!({"type": "error", "error": {"type": anthropic, "message": message}})
        } else {
            json!({"error": {"message": message, "type": openai, "param": param, "code": status.as_u16()}})
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct ServedModels {
    pub models: Vec<String>,
    pub adapters: Vec<String>,
    /// The maximum length of prompt and output together, in tokens.
    pub model_len: u32,
}

impl ServedModels {
    /// Returns the name of the model and, if the model is an adapter, the adapter's index. If the
    /// request names no model, returns the first model, as vLLM does.
    fn resolve(&self, asked: Option<&str>) -> Result<(String, Option<usize>), ApiError> {
        let Some(name) = asked else {
            return Ok((self.models.first().cloned().unwrap_or_default(), None));
        };
        if self.models.iter().any(|model| model == name) {
            return Ok((name.to_owned(), None));
        }
        if let Some(adapter) = self.adapters.iter().position(|adapter| adapter == name) {
            return Ok((name.to_owned(), Some(adapter)));
        }
        let message = format!("The model `{name}` does not exist.");
        Err(ApiError {
            status: StatusCode::NOT_FOUND,
            message,
            param: Some("model"),
        })
    }
}

#[derive(Clone, Debug)]
pub(super) struct InferenceRequest {
    pub api: ModelApi,
    pub model: String,
    pub adapter: Option<usize>,
    pub prompts: Vec<Vec<u8>>,
    pub n: u32,
    pub stream: bool,
    pub include_usage: bool,
    pub continuous_usage: bool,
    pub max_tokens: Option<u32>,
    pub min_tokens: u32,
    pub ignore_eos: bool,
    pub cache_salt: String,
}

impl InferenceRequest {
    pub(super) fn parse(
        api: ModelApi,
        body: &[u8],
        served: &ServedModels,
    ) -> Result<Self, ApiError> {
        let body: Value = serde_json::from_slice(body)
            .map_err(|error| ApiError::bad_request(format!("Invalid JSON body: {error}"), None))?;
        if !body.is_object() {
            return Err(ApiError::bad_request(
                "The body must be a JSON object.",
                None,
            ));
        }
        let (model, adapter) = served.resolve(body["model"].as_str())?;
        let prompts = prompts(api, &body)?;
        let n = if matches!(api, ModelApi::Chat | ModelApi::Completions) {
            body["n"].as_u64().unwrap_or(1).max(1)
        } else {
            1
        };
        if prompts.is_empty() || prompts.len().saturating_mul(n as usize) > SEQUENCES_MAX {
            return Err(ApiError::bad_request(
                format!("1 to {SEQUENCES_MAX} sequences a request."),
                Some("n"),
            ));
        }
        let max_tokens = api
            .max_tokens_keys()
            .iter()
            .find_map(|key| body[*key].as_u64());
        if max_tokens == Some(0) {
            return Err(ApiError::bad_request(
                "max_tokens must be at least 1, got 0.",
                Some("max_tokens"),
            ));
        }
        let max_tokens =
            max_tokens.or((api == ModelApi::Completions).then_some(COMPLETION_TOKENS_DEFAULT));
        let clamp = |tokens: u64| u32::try_from(tokens).unwrap_or(u32::MAX);
        let flag = |value: &Value| value.as_bool().unwrap_or(false);
        let inference = Self {
            api,
            model,
            adapter,
            prompts,
            n: clamp(n),
            stream: flag(&body["stream"]),
            include_usage: flag(&body["stream_options"]["include_usage"]),
            continuous_usage: flag(&body["stream_options"]["continuous_usage_stats"]),
            max_tokens: max_tokens.map(clamp),
            min_tokens: clamp(body["min_tokens"].as_u64().unwrap_or(0)),
            ignore_eos: flag(&body["ignore_eos"]),
            cache_salt: body["cache_salt"].as_str().unwrap_or_default().to_owned(),
        };
        inference.check_length(served.model_len)?;
        Ok(inference)
    }

    fn check_length(&self, model_len: u32) -> Result<(), ApiError> {
        for prompt in &self.prompts {
            let tokens = text::token_count(prompt.len());
            if tokens == 0 {
                return Err(ApiError::bad_request("The prompt is empty.", None));
            }
            if tokens >= model_len {
                let message = format!(
                    "This model's maximum context length is {model_len} tokens. However, your request has {tokens} input tokens."
                );
                return Err(ApiError::bad_request(message, None));
            }
        }
        Ok(())
    }

    /// Returns the number of tokens that an engine of `model_len` generates for a prompt, and the
    /// reason why the output ends. The number has an exponential distribution with mean `mean`,
    /// within the limits.
    pub(super) fn output(
        &self,
        prompt_tokens: u32,
        rng: &mut TextRng,
        mean: u32,
        model_len: u32,
    ) -> (u32, FinishReason) {
        let room = model_len.saturating_sub(prompt_tokens).max(1);
        let limit = self.max_tokens.unwrap_or(u32::MAX).min(room);
        let drawn = (-rng.unit().ln() * f64::from(mean)).ceil() as u32;
        let wanted = if self.ignore_eos {
            u32::MAX
        } else {
            drawn.max(self.min_tokens).max(1)
        };
        if wanted > limit {
            (limit, FinishReason::Length)
        } else {
            (wanted, FinishReason::Stop)
        }
    }
}

fn prompts(api: ModelApi, body: &Value) -> Result<Vec<Vec<u8>>, ApiError> {
    match api {
        ModelApi::Chat => Ok(vec![conversation(
            &[&body["tools"]],
            &body["messages"],
            "messages",
        )?]),
        ModelApi::Messages | ModelApi::CountTokens => Ok(vec![conversation(
            &[&body["tools"], &body["system"]],
            &body["messages"],
            "messages",
        )?]),
        ModelApi::Responses => {
            let head = [&body["tools"], &body["instructions"]];
            match &body["input"] {
                Value::String(text) => Ok(vec![conversation(
                    &head,
                    &json!([{"role": "user", "content": text}]),
                    "input",
                )?]),
                items => Ok(vec![conversation(&head, items, "input")?]),
            }
        }
        ModelApi::Completions => texts(&body["prompt"], "prompt"),
        ModelApi::Embeddings if body["input"].is_null() => {
            Ok(vec![conversation(&[], &body["messages"], "input")?])
        }
        ModelApi::Embeddings => texts(&body["input"], "input"),
    }
}

/// Parses a string, token ids, or an array of either.
fn texts(value: &Value, param: &'static str) -> Result<Vec<Vec<u8>>, ApiError> {
    let wrong = || {
        ApiError::bad_request(
            format!("`{param}` must be a string, an array of strings or of token ids."),
            Some(param),
        )
    };
    let one = |value: &Value| match value {
        Value::String(text) => Some(text.clone().into_bytes()),
        Value::Array(ids) => token_bytes(ids),
        _ => None,
    };
    match value {
        Value::Array(items) if items.first().is_some_and(|item| !item.is_number()) => items
            .iter()
            .map(one)
            .collect::<Option<_>>()
            .ok_or_else(wrong),
        _ => Ok(vec![one(value).ok_or_else(wrong)?]),
    }
}

fn token_bytes(ids: &[Value]) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(ids.len() * TOKEN_BYTES);
    for id in ids {
        bytes.extend_from_slice(&u32::try_from(id.as_u64()?).ok()?.to_le_bytes());
    }
    Some(bytes)
}

fn conversation(
    head: &[&Value],
    messages: &Value,
    param: &'static str,
) -> Result<Vec<u8>, ApiError> {
    let Some(messages) = messages.as_array().filter(|messages| !messages.is_empty()) else {
        return Err(ApiError::bad_request(
            format!("`{param}` must be a non-empty array of messages."),
            Some(param),
        ));
    };
    let mut prompt = Vec::new();
    for part in head.iter().filter(|part| !part.is_null()) {
        prompt.extend_from_slice(b"<|system|>");
        write_content(part, &mut prompt);
        prompt.push(b'\n');
    }
    for message in messages {
        let role = message["role"].as_str().unwrap_or("user");
        prompt.extend_from_slice(format!("<|{role}|>").as_bytes());
        for key in ["content", "tool_calls", "output"] {
            write_content(&message[key], &mut prompt);
        }
        prompt.push(b'\n');
    }
    prompt.extend_from_slice(b"<|assistant|>");
    Ok(prompt)
}

/// Appends text as it is, and other content (images, tools, tool calls) as its JSON.
fn write_content(content: &Value, prompt: &mut Vec<u8>) {
    match content {
        Value::Null => {}
        Value::String(text) => prompt.extend_from_slice(text.as_bytes()),
        Value::Array(parts) => {
            for part in parts {
                match part["text"].as_str() {
                    Some(text) => prompt.extend_from_slice(text.as_bytes()),
                    None => prompt.extend_from_slice(part.to_string().as_bytes()),
                }
            }
        }
        other => prompt.extend_from_slice(other.to_string().as_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(api: ModelApi, body: &Value) -> Result<InferenceRequest, ApiError> {
        let served = ServedModels {
            models: vec!["base".into()],
            adapters: vec!["style".into()],
            model_len: 1000,
        };
        InferenceRequest::parse(api, body.to_string().as_bytes(), &served)
    }

    #[test]
    fn the_next_turn_extends_the_bytes_of_this_one() {
        let ask = json!([{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hello"}]}]);
        let mut first = parse(ModelApi::Chat, &json!({"model": "base", "messages": ask}))
            .unwrap()
            .prompts
            .remove(0);
        first.extend_from_slice(b"an answer");
        let mut turns = ask.as_array().unwrap().clone();
        turns.extend([
            json!({"role": "assistant", "content": "an answer"}),
            json!({"role": "user", "content": "more"}),
        ]);
        let second = parse(ModelApi::Chat, &json!({"model": "base", "messages": turns}))
            .unwrap()
            .prompts
            .remove(0);
        assert!(second.starts_with(&first));
    }

    #[test]
    fn prompts_come_as_text_texts_or_tokens() {
        for (prompt, lengths) in [
            (json!("hello"), vec![5]),
            (json!(["one", "three"]), vec![3, 5]),
            (json!([1, 2, 3]), vec![12]),
            (json!([[1, 2], [3]]), vec![8, 4]),
        ] {
            let found = parse(ModelApi::Completions, &json!({"prompt": prompt})).unwrap();
            assert_eq!(
                found.prompts.iter().map(Vec::len).collect::<Vec<_>>(),
                lengths
            );
            assert_eq!((found.model.as_str(), found.max_tokens), ("base", Some(16)));
        }
    }

    #[test]
    fn mistakes_are_named_in_the_shape_of_the_family() {
        let unknown = parse(
            ModelApi::Chat,
            &json!({"model": "other", "messages": [{"role": "user", "content": "x"}]}),
        )
        .unwrap_err();
        assert_eq!(
            unknown.body(ModelApi::Chat),
            json!({"error": {"message": "The model `other` does not exist.", "type": "NotFoundError", "param": "model", "code": 404}})
        );
        assert_eq!(
            unknown.body(ModelApi::Messages)["error"]["type"],
            "not_found_error"
        );
        for body in [
            json!({}),
            json!({"prompt": 3}),
            json!({"prompt": ["a", 1]}),
            json!({"prompt": "x".repeat(4000)}),
            json!({"prompt": ""}),
            json!([]),
        ] {
            assert_eq!(
                parse(ModelApi::Completions, &body).unwrap_err().status,
                StatusCode::BAD_REQUEST,
                "{body}"
            );
        }
        let cut = InferenceRequest::parse(
            ModelApi::Chat,
            b"{\"model\":",
            &ServedModels {
                models: vec![],
                adapters: vec![],
                model_len: 9,
            },
        )
        .unwrap_err();
        assert!(cut.message.starts_with("Invalid JSON"), "{cut:?}");
    }

    #[test]
    fn output_length_keeps_its_limits() {
        let ask = |limits: Value| {
            let mut body = json!({"prompt": "hello"});
            body.as_object_mut()
                .unwrap()
                .extend(limits.as_object().unwrap().clone());
            let inference = parse(ModelApi::Completions, &body).unwrap();
            (0..200)
                .map(|seed| inference.output(2, &mut TextRng(seed), 50, 1000))
                .collect::<Vec<_>>()
        };
        assert!(
            ask(json!({"max_tokens": 7, "ignore_eos": true}))
                .iter()
                .all(|output| *output == (7, FinishReason::Length))
        );
        assert!(
            ask(json!({"max_tokens": 5000, "ignore_eos": true}))
                .iter()
                .all(|output| *output == (998, FinishReason::Length))
        );
        let drawn = ask(json!({"max_tokens": 90, "min_tokens": 20}));
        assert!(
            drawn
                .iter()
                .all(|(tokens, finish)| (20..=90).contains(tokens)
                    && (*tokens == 90 || *finish == FinishReason::Stop))
        );
        assert!(
            drawn
                .iter()
                .any(|(_, finish)| *finish == FinishReason::Length)
                && drawn
                    .iter()
                    .any(|(_, finish)| *finish == FinishReason::Stop)
        );
    }
}
