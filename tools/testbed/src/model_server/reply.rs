//! Writes inference replies: one JSON object, or server-sent events in the format of the API
//! family.

use std::fmt::Write as _;
use std::io::Write as _;

use serde_json::{Value, json};

use super::driver::{OutputKind, SequenceOutput};
use super::engine::FinishReason;
use super::request::ModelApi;
use super::text::TOKEN_BYTES;

/// The number of dimensions of an embedding, enough for a realistic reply.
const EMBEDDING_DIMENSIONS: usize = 16;

/// One sequence of a reply in progress.
#[derive(Clone, Debug)]
pub(super) struct ReplyChoice {
    pub prompt_tokens: u32,
    /// The text that the choice has when it is complete.
    pub text: String,
    pub cached_tokens: u32,
    pub tokens: u32,
    pub finish: Option<FinishReason>,
}

impl ReplyChoice {
    pub(super) fn new(prompt_tokens: u32, text: String) -> Self {
        Self {
            prompt_tokens,
            text,
            cached_tokens: 0,
            tokens: 0,
            finish: None,
        }
    }

    fn text_so_far(&self) -> &str {
        &self.text[..(self.tokens as usize * TOKEN_BYTES).min(self.text.len())]
    }

    fn last_word(&self) -> &str {
        let text = self.text_so_far();
        &text[text.len().saturating_sub(TOKEN_BYTES)..]
    }
}

#[derive(Clone, Debug)]
pub(super) struct ModelReply {
    pub api: ModelApi,
    pub id: String,
    /// The creation time, in seconds since 1970.
    pub created: u64,
    pub model: String,
    /// Choices per prompt. The prompt tokens are counted once for all choices.
    pub n: u32,
    pub include_usage: bool,
    pub continuous_usage: bool,
    pub choices: Vec<ReplyChoice>,
}

impl ModelReply {
    /// Applies an output of the engine. Returns true if a stream has an event for it.
    fn apply(&mut self, output: SequenceOutput) -> bool {
        let Some(choice) = self.choices.get_mut(output.index) else {
            return false;
        };
        match output.kind {
            OutputKind::Admitted { cached_tokens } => choice.cached_tokens = cached_tokens,
            OutputKind::Token => choice.tokens += 1,
            OutputKind::Finished(finish) => choice.finish = Some(finish),
        }
        !matches!(output.kind, OutputKind::Admitted { .. })
    }

    pub(super) fn absorb(&mut self, output: SequenceOutput) {
        self.apply(output);
    }

    /// Applies an output and appends its events to `out`. Returns true if the output had events.
    pub(super) fn stream(&mut self, output: SequenceOutput, out: &mut Vec<u8>) -> bool {
        if !self.apply(output) {
            return false;
        }
        let first =
            matches!(output.kind, OutputKind::Token) && self.choices[output.index].tokens == 1;
        match self.api {
            ModelApi::Responses => self.stream_response(output, first, out),
            ModelApi::Messages => self.stream_message(output, first, out),
            _ => self.stream_chunk(output, first, out),
        }
        true
    }

    /// Appends the events that end a stream.
    pub(super) fn close(&self, out: &mut Vec<u8>) {
        match self.api {
            ModelApi::Responses | ModelApi::Messages => {}
            _ => {
                if self.include_usage {
                    let mut line = self.chunk_head();
                    let _ = write!(line, r#"[],"usage":{}}}"#, self.usage()); // writing to a String cannot fail
                    event(None, &line, out);
                }
                event(None, "[DONE]", out);
            }
        }
    }

    fn totals(&self) -> (u32, u32, u32) {
        let prompts = self.choices.iter().step_by(self.n.max(1) as usize);
        (
            prompts.clone().map(|choice| choice.prompt_tokens).sum(),
            prompts.map(|choice| choice.cached_tokens).sum(),
            self.choices.iter().map(|choice| choice.tokens).sum(),
        )
    }

    fn usage(&self) -> Value {
        let (prompt, cached, output) = self.totals();
        match self.api {
            ModelApi::Responses => json!({
                "input_tokens": prompt, "input_tokens_details": {"cached_tokens": cached},
                "output_tokens": output, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": prompt + output,
            }),
            // Anthropic counts cached input tokens separately.
            ModelApi::Messages => json!({
                "input_tokens": prompt - cached, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached,
                "output_tokens": output,
            }),
            _ => json!({
                "prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output,
                "prompt_tokens_details": {"cached_tokens": cached},
            }),
        }
    }

    /// Returns the part of a chat or completion chunk before its choices. The code writes JSON by
    /// hand, because benchmarks send hundreds of thousands of chunks.
    fn chunk_head(&self) -> String {
        let object = if self.api == ModelApi::Chat {
            "chat.completion.chunk"
        } else {
            "text_completion"
        };
        let id = &self.id;
        let created = self.created;
        let model = Value::from(self.model.as_str());
        format!(
            r#"{{"id":"{id}","object":"{object}","created":{created},"model":{model},"choices":"#
        )
    }

    fn stream_chunk(&self, output: SequenceOutput, first: bool, out: &mut Vec<u8>) {
        let head = self.chunk_head();
        let tail = if self.continuous_usage {
            format!(r#","usage":{}}}"#, self.usage())
        } else {
            "}".to_owned()
        };
        let index = output.index;
        let choice = &self.choices[output.index];
        let chat = self.api == ModelApi::Chat;
        if first && chat {
            let line = format!(
                r#"{head}[{{"index":{index},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]{tail}"#
            );
            event(None, &line, out);
        }
        let (word, finish) = match choice.finish {
            None => (choice.last_word(), Value::Null),
            Some(finish) => ("", openai_finish(finish)),
        };
        let delta = match (chat, choice.finish) {
            (true, None) => format!(r#""delta":{{"content":"{word}"}}"#),
            (true, Some(_)) => r#""delta":{}"#.to_owned(),
            (false, _) => format!(r#""text":"{word}""#),
        };
        event(
            None,
            &format!(
                r#"{head}[{{"index":{index},{delta},"logprobs":null,"finish_reason":{finish}}}]{tail}"#
            ),
            out,
        );
    }

    fn stream_response(&self, output: SequenceOutput, first: bool, out: &mut Vec<u8>) {
        let choice = &self.choices[output.index];
        let part = |text: &str| json!({"type": "output_text", "text": text, "annotations": []});
        let mut send = |kind: &str, mut fields: Value| {
            if kind.starts_with("response.output_text") || kind.starts_with("response.content_part")
            {
                fields["item_id"] = self.item("")["id"].take();
                fields["content_index"] = json!(0);
            }
            if fields.get("response").is_none() {
                fields["output_index"] = json!(0);
            }
            named_event(kind, fields, out);
        };
        if first {
            send(
                "response.created",
                json!({"response": self.response("in_progress")}),
            );
            send(
                "response.in_progress",
                json!({"response": self.response("in_progress")}),
            );
            send(
                "response.output_item.added",
                json!({"item": self.item("in_progress")}),
            );
            send("response.content_part.added", json!({"part": part("")}));
        }
        if choice.finish.is_none() {
            return send(
                "response.output_text.delta",
                json!({"delta": choice.last_word(), "logprobs": []}),
            );
        }
        send(
            "response.output_text.done",
            json!({"text": choice.text_so_far(), "logprobs": []}),
        );
        send(
            "response.content_part.done",
            json!({"part": part(choice.text_so_far())}),
        );
        send(
            "response.output_item.done",
            json!({"item": self.item("completed")}),
        );
        send(
            "response.completed",
            json!({"response": self.response("completed")}),
        );
    }

    fn stream_message(&self, output: SequenceOutput, first: bool, out: &mut Vec<u8>) {
        let choice = &self.choices[output.index];
        let mut send = |kind: &str, fields: Value| named_event(kind, fields, out);
        if first {
            let mut message = self.message();
            message["content"] = json!([]);
            message["stop_reason"] = Value::Null;
            send("message_start", json!({"message": message}));
            send(
                "content_block_start",
                json!({"index": 0, "content_block": {"type": "text", "text": ""}}),
            );
            send("ping", json!({}));
        }
        let Some(finish) = choice.finish else {
            let delta = json!({"type": "text_delta", "text": choice.last_word()});
            return send("content_block_delta", json!({"index": 0, "delta": delta}));
        };
        send("content_block_stop", json!({"index": 0}));
        let delta = json!({"stop_reason": anthropic_finish(finish), "stop_sequence": null});
        send(
            "message_delta",
            json!({"delta": delta, "usage": self.usage()}),
        );
        send("message_stop", json!({}));
    }

    pub(super) fn to_json(&self) -> Value {
        match self.api {
            ModelApi::Responses => self.response("completed"),
            ModelApi::Messages => self.message(),
            ModelApi::CountTokens => json!({"input_tokens": self.totals().0}),
            ModelApi::Embeddings => self.embeddings(),
            ModelApi::Chat | ModelApi::Completions => {
                let choice = |(index, choice): (usize, &ReplyChoice)| {
                    let finish = choice.finish.map_or(Value::Null, openai_finish);
                    if self.api == ModelApi::Chat {
                        let message = json!({"role": "assistant", "content": choice.text_so_far()});
                        json!({"index": index, "message": message, "logprobs": null, "finish_reason": finish})
                    } else {
                        json!({"index": index, "text": choice.text_so_far(), "logprobs": null, "finish_reason": finish})
                    }
                };
                let object = if self.api == ModelApi::Chat {
                    "chat.completion"
                } else {
                    "text_completion"
                };
                json!({
                    "id": self.id, "object": object, "created": self.created, "model": self.model,
                    "choices": self.choices.iter().enumerate().map(choice).collect::<Vec<_>>(), "usage": self.usage(),
                })
            }
        }
    }

    fn response(&self, status: &str) -> Value {
        let done = status == "completed";
        json!({
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "model": self.model,
            "output": if done { json!([self.item(status)]) } else { json!([]) },
            "usage": if done { self.usage() } else { Value::Null },
            "parallel_tool_calls": true, "tool_choice": "auto", "tools": [],
        })
    }

    /// Returns the message item of a Responses reply, which is empty until the reply is complete.
    fn item(&self, status: &str) -> Value {
        let text = json!({"type": "output_text", "text": self.choices[0].text_so_far(), "annotations": []});
        let content = if status == "completed" {
            json!([text])
        } else {
            json!([])
        };
        json!({"type": "message", "id": format!("msg_{}", self.id), "status": status, "role": "assistant", "content": content})
    }

    fn message(&self) -> Value {
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model,
            "content": [{"type": "text", "text": self.choices[0].text_so_far()}],
            "stop_reason": self.choices[0].finish.map_or(Value::Null, anthropic_finish), "stop_sequence": null, "usage": self.usage(),
        })
    }

    fn embeddings(&self) -> Value {
        let embedding = |(index, choice): (usize, &ReplyChoice)| {
            let mut rng = super::text::TextRng(u64::from(choice.prompt_tokens) ^ index as u64);
            let vector: Vec<f64> = (0..EMBEDDING_DIMENSIONS)
                .map(|_| rng.unit() * 2.0 - 1.0)
                .collect();
            json!({"object": "embedding", "index": index, "embedding": vector})
        };
        let (prompt, ..) = self.totals();
        json!({
            "id": self.id, "object": "list", "created": self.created, "model": self.model,
            "data": self.choices.iter().enumerate().map(embedding).collect::<Vec<_>>(),
            "usage": {"prompt_tokens": prompt, "total_tokens": prompt, "completion_tokens": 0},
        })
    }
}

fn openai_finish(finish: FinishReason) -> Value {
    json!(match finish {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Abort => "abort",
    })
}

fn anthropic_finish(finish: FinishReason) -> Value {
    json!(if finish == FinishReason::Length {
        "max_tokens"
    } else {
        "end_turn"
    })
}

fn named_event(kind: &str, mut fields: Value, out: &mut Vec<u8>) {
    fields["type"] = json!(kind);
    event(Some(kind), &fields.to_string(), out);
}

fn event(kind: Option<&str>, data: &str, out: &mut Vec<u8>) {
    if let Some(kind) = kind {
        let _ = writeln!(out, "event: {kind}"); // writing to a Vec cannot fail
    }
    let _ = write!(out, "data: {data}\n\n");
}
