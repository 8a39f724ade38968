//! Which inference API a request speaks, told by its path, and in whose shape its errors must be.

/// An API whose bodies we read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Api {
    /// OpenAI `/v1/chat/completions`.
    ChatCompletions,
    /// OpenAI `/v1/completions`.
    Completions,
    /// OpenAI `/v1/responses`.
    Responses,
    /// OpenAI `/v1/embeddings`.
    Embeddings,
    /// Anthropic `/v1/messages`.
    Messages,
    /// Anything else: its body is opaque to us; it is picked for all the same.
    Other {
        /// The shape its errors must have.
        family: Family,
    },
}

/// Whose clients read the error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// `{"error":{"message","type","param","code"}}`
    OpenAi,
    /// `{"type":"error","error":{"type","message"}}`
    Anthropic,
}

/// Path suffixes, since gateways mount these APIs below a prefix (`/myapp/v1/chat/completions`).
const PATHS: [(&[u8], Api); 5] = [
    (b"/v1/chat/completions", Api::ChatCompletions),
    (b"/v1/completions", Api::Completions),
    (b"/v1/responses", Api::Responses),
    (b"/v1/embeddings", Api::Embeddings),
    (b"/v1/messages", Api::Messages),
];

/// What all paths of Anthropic's API have in common (`/v1/messages/count_tokens`, `/v1/messages/batches`).
const ANTHROPIC_PATH: &[u8] = b"/v1/messages";

impl Api {
    /// The API of `method` and `path` (`:path`, with or without a query).
    #[must_use]
    pub fn of(method: &[u8], path: &[u8]) -> Self {
        let path = path.split(|&byte| byte == b'?').next().unwrap_or_default();
        let known = PATHS.into_iter().find(|(suffix, _)| method == b"POST" && path.ends_with(suffix));
        known.map_or_else(|| Self::Other { family: Family::of_path(path) }, |(_, api)| api)
    }

    /// Must the body be valid JSON that names a model?
    #[must_use]
    pub fn is_inference(self) -> bool {
        !matches!(self, Self::Other { .. })
    }

    /// In whose shape errors are.
    #[must_use]
    pub fn error_family(self) -> Family {
        match self {
            Self::ChatCompletions | Self::Completions | Self::Responses | Self::Embeddings => Family::OpenAi,
            Self::Messages => Family::Anthropic,
            Self::Other { family } => family,
        }
    }
}

impl Family {
    fn of_path(path: &[u8]) -> Self {
        if memchr::memmem::find(path, ANTHROPIC_PATH).is_some() { Self::Anthropic } else { Self::OpenAi }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OTHER: Api = Api::Other { family: Family::OpenAi };

    #[test]
    fn a_path_names_its_api_whatever_stands_before_it_or_in_its_query() {
        for (path, api) in [
            ("/v1/chat/completions", Api::ChatCompletions),
            ("/v1/completions", Api::Completions),
            ("/v1/responses", Api::Responses),
            ("/v1/embeddings", Api::Embeddings),
            ("/v1/messages", Api::Messages),
            ("/myapp/v1/chat/completions", Api::ChatCompletions),
            ("/v1/chat/completions?api-version=1", Api::ChatCompletions),
            ("/v1/completions?next=/v1/messages", Api::Completions),
            ("/chat/completions", OTHER),
            ("/v1/chat/completions/", OTHER),
            ("/v1/responses/resp_1/cancel", OTHER),
            ("/V1/COMPLETIONS", OTHER),
            ("", OTHER),
            ("?/v1/completions", OTHER),
        ] {
            assert_eq!(Api::of(b"POST", path.as_bytes()), api, "{path}");
        }
    }

    #[test]
    fn only_post_has_a_body_we_read() {
        for method in ["GET", "HEAD", "PUT", "post", ""] {
            assert!(!Api::of(method.as_bytes(), b"/v1/completions").is_inference(), "{method}");
        }
    }

    #[test]
    fn errors_take_the_shape_the_client_of_that_path_reads() {
        assert_eq!(Api::of(b"POST", b"/v1/messages").error_family(), Family::Anthropic);
        assert_eq!(Api::of(b"POST", b"/v1/messages/count_tokens").error_family(), Family::Anthropic);
        assert_eq!(Api::of(b"GET", b"/a/v1/messages/batches").error_family(), Family::Anthropic);
        assert_eq!(Api::of(b"POST", b"/v1/completions").error_family(), Family::OpenAi);
        assert_eq!(Api::of(b"GET", b"/health?q=/v1/messages").error_family(), Family::OpenAi);
    }
}
