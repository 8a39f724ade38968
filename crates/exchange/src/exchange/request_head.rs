//! The headers of a request.

use super::slo::SloHeaders;
use crate::headers;
use crate::settings::ExchangeSettings;

/// The request headers that an exchange reads. Most fields hold one header.
#[derive(Debug, Default)]
pub(super) struct RequestHead<'h> {
    pub(super) method: &'h [u8],
    pub(super) path: &'h [u8],
    pub(super) content_length: Option<usize>,
    pub(super) unbuffered: bool,
    pub(super) grpc: bool,
    pub(super) explain: bool,
    pub(super) objective: HeaderPair<'h>,
    pub(super) rewrite: HeaderPair<'h>,
    pub(super) slo: SloHeaders<'h>,
    pub(super) model: Option<&'h [u8]>,
    pub(super) credentials: Option<&'h [u8]>,
    /// The name of the client, from the configured header.
    pub(super) client: Option<&'h [u8]>,
    /// `x-forwarded-for`. Its last entry, which the proxy appends, is the downstream address.
    pub(super) forwarded_for: &'h [u8],
    pub(super) ttl_ms: Option<u64>,
    pub(super) encoding: Option<&'h [u8]>,
    pub(super) content_type: &'h [u8],
}

/// The value of a header that has two names: the first value of each.
#[derive(Debug, Default)]
pub(super) struct HeaderPair<'h>([Option<&'h [u8]>; 2]);

// === impl RequestHead ===

impl<'h> RequestHead<'h> {
    pub(super) fn read(
        pairs: impl IntoIterator<Item = (&'h [u8], &'h [u8])>,
        settings: &ExchangeSettings,
    ) -> Self {
        let model_header = settings.model_header.as_bytes();
        let ttl_header = settings.flow.ttl_header.as_bytes();
        let client_header = settings.client_header.as_bytes();
        let number = |value: &[u8]| {
            std::str::from_utf8(value)
                .ok()
                .and_then(|text| text.parse().ok())
        };
        let mut head = Self::default();
        for (name, value) in pairs {
            match name {
                b":method" => head.method = value,
                b":path" => head.path = value,
                b"content-length" => {
                    head.content_length =
                        number(value).and_then(|bytes| usize::try_from(bytes).ok());
                }
                // The headers of upgrades and of gRPC streams do not end the stream, but no body
                // follows. Holding them would hang the request.
                b"upgrade" => head.unbuffered = true,
                b"content-encoding" => {
                    head.encoding = head
                        .encoding
                        .or(Some(value).filter(|value| headers::is_encoded(value)));
                }
                b"authorization" | b"x-api-key" => head.credentials = Some(value),
                b"x-forwarded-for" => head.forwarded_for = value,
                b"content-type" => {
                    head.grpc |= value.starts_with(b"application/grpc");
                    head.content_type = value;
                }
                _ => {
                    head.explain |= name == headers::EXPLAIN.as_bytes() && value == b"1";
                    head.objective.offer(headers::OBJECTIVE, name, value);
                    head.rewrite.offer(headers::MODEL_REWRITE, name, value);
                    head.slo.offer(name, value);
                    if name == model_header && !value.is_empty() {
                        head.model = head.model.or(Some(value));
                    }
                    if name == client_header && !value.is_empty() {
                        head.client = head.client.or(Some(value));
                    }
                    if name == ttl_header {
                        head.ttl_ms = head.ttl_ms.or(number(value));
                    }
                }
            }
        }
        head.unbuffered |= head.method == b"CONNECT";
        head
    }

    pub(super) fn path_is(&self, path: &[u8]) -> bool {
        self.path.split(|&b| b == b'?').next() == Some(path)
    }
}

// === impl HeaderPair ===

impl<'h> HeaderPair<'h> {
    fn offer(&mut self, names: [&str; 2], name: &[u8], value: &'h [u8]) {
        for (known, slot) in names.iter().zip(&mut self.0) {
            if known.as_bytes() == name {
                *slot = slot.or(Some(value));
            }
        }
    }

    /// Returns the value under the current name. Without one, returns the value under the older
    /// name. An empty value, or a value that is not text, counts as absent.
    pub(super) fn get(&self) -> Option<&'h str> {
        self.0
            .iter()
            .flatten()
            .filter_map(|value| std::str::from_utf8(value).ok())
            .find(|value| !value.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_current_name_goes_before_the_older_one_and_the_first_value_before_others() {
        let [current, older] = headers::OBJECTIVE;
        for (given, read) in [
            (&[][..], None),
            (&[(older, "a")], Some("a")),
            (&[(older, "a"), (current, "b")], Some("b")),
            (&[(current, "b"), (current, "c")], Some("b")),
            (&[(current, ""), (older, "a")], Some("a")),
            (&[(current, "\u{fe}"), ("x-other", "a")], Some("\u{fe}")),
        ] {
            let settings = ExchangeSettings::default();
            let head = RequestHead::read(
                given
                    .iter()
                    .map(|(name, value)| (name.as_bytes(), value.as_bytes())),
                &settings,
            );
            assert_eq!(head.objective.get(), read, "{given:?}");
        }
        assert_eq!(
            RequestHead::read(
                [(current.as_bytes(), &b"\xff"[..])],
                &ExchangeSettings::default()
            )
            .objective
            .get(),
            None
        );
    }

    #[test]
    fn the_wait_of_a_request_is_read_where_its_header_is_named() {
        let mut settings = ExchangeSettings::default();
        let read = |settings: &ExchangeSettings, value: &'static str| {
            RequestHead::read(
                [
                    (&b"x-queue-ttl-ms"[..], value.as_bytes()),
                    (b"x-queue-ttl-ms", b"7"),
                ],
                settings,
            )
            .ttl_ms
        };
        assert_eq!(read(&settings, "5"), None);
        settings.flow.ttl_header = "x-queue-ttl-ms".to_owned();
        let given = ["5", "0", "-1", "5s", "", "99999999999999999999"];
        assert_eq!(
            given.map(|value| read(&settings, value)),
            [Some(5), Some(0), Some(7), Some(7), Some(7), Some(7)]
        );
    }
}
