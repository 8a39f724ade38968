//! The members of request bodies that are read, and what they mean.

use crate::body::PromptSection;

/// The meaning of a value of a request body.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Field {
    Body,
    Model,
    Stream,
    StreamOptions,
    IncludeUsage,
    MaxCompletionTokens,
    MaxTokens,
    /// An object with the limit of tokens, which has this name.
    SamplingParams(SamplingLimit),
    /// How many outputs each prompt has.
    Outputs,
    CacheSalt,
    /// An id, or an object with an id.
    StoredId,
    /// An object with the id of a stored prompt.
    StoredPrompt,
    /// Text, or objects and arrays with more of it, at this level.
    Content(PromptSection, u8),
    /// Text that the template prints unchanged.
    Text(PromptSection),
    /// An image, video, audio clip or file.
    Media(PromptSection),
    /// A value that is not read.
    Other,
}

/// The name of the limit of tokens in `sampling_params`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SamplingLimit {
    /// vLLM's `max_tokens`.
    MaxTokens,
    /// SGLang's `max_new_tokens`.
    MaxNewTokens,
}

/// Top-level members of a body, with their meaning.
pub(super) type Members = &'static [(&'static str, Field)];

/// The members that all APIs have.
pub(super) const COMMON: Members = &[
    ("model", Field::Model),
    ("stream", Field::Stream),
    ("stream_options", Field::StreamOptions),
    ("n", Field::Outputs),
    ("best_of", Field::Outputs),
];

pub(super) const TOOLS: Field = Field::Text(PromptSection::Tools);
pub(super) const SYSTEM: Field = Field::Content(PromptSection::System, 0);
pub(super) const TURNS: Field = Field::Content(PromptSection::Turns, 0);
/// Media that the prompt's tokens refer to. The prompt has the same mark for all media, so the
/// media are hashed before it.
pub(super) const MEDIA: Field = Field::Media(PromptSection::System);

pub(super) const CHAT: Members = &[
    ("tools", TOOLS),
    ("messages", TURNS),
    ("max_completion_tokens", Field::MaxCompletionTokens),
    ("max_tokens", Field::MaxTokens),
];
