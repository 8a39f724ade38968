//! Reads the headers of a response, and who made it.

use envoy_types::pb::envoy::service::ext_proc::v3::{HttpHeaders, ProcessingRequest};
use exchange::{ResponseHead, ResponseOrigin};

use super::ExtProcHost;
use crate::wire::{self, BodyMode};

/// The metadata key of the served endpoint, in the destination's namespace.
const SERVED: &str = "x-gateway-destination-endpoint-served";

// === impl ExtProcHost ===

impl ExtProcHost {
    /// Reads response headers. The served endpoint is read from the attributes that the proxy
    /// sends. If they have none, it is read from the metadata of the protocol.
    pub(in crate::ext_proc_stream) fn response_head<'m>(
        &self,
        message: &'m ProcessingRequest,
        given: &'m HttpHeaders,
    ) -> ResponseHead<'m> {
        let mut head = ResponseHead::read(wire::pairs(given.headers.as_ref()));
        let served = wire::metadata(
            message.metadata_context.as_ref(),
            self.server.destination_namespace(),
            SERVED,
        )
        .and_then(wire::text);
        match wire::text_attribute(message, "response.code_details") {
            Some(details) => {
                head.origin = ResponseOrigin::of_details(details.as_bytes());
                head.upstream_address = wire::text_attribute(message, "upstream.address")
                    .or(served)
                    .map(str::as_bytes);
                head.attempts =
                    wire::count_attribute(message, "upstream.request_attempt_count").unwrap_or(0);
            }
            None => {
                // The proxy's own errors look like those of a server here, so nothing is learned
                // from them.
                head.origin = if matches!(head.status, 502..=504) {
                    ResponseOrigin::Ours
                } else {
                    ResponseOrigin::Upstream
                };
                head.upstream_address = served.map(str::as_bytes);
            }
        }
        head.end_of_stream = given.end_of_stream;
        match self.modes().response {
            // Only in this mode do the headers wait for the body.
            BodyMode::Buffered => {}
            // A body that Envoy does not send is like one in an unknown encoding.
            BodyMode::None => head.encoded = true,
            BodyMode::Streamed { .. } | BodyMode::BufferedPartial | BodyMode::FullDuplex => {
                head.go_first = true;
            }
        }
        head
    }
}
