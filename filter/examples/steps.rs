//! A filter that decides nothing, in four depths. It shows what any picker in wasm costs before it
//! picks. `bench steps` compares it with Switchpoint's filter.
//!
//! Its configuration is the depth, a space, and the endpoint for all requests:
//!
//! | depth | what it does |
//! |---|---|
//! | `passes` | is called |
//! | `reads` | holds the request until its body is complete, and copies the body out |
//! | `speaks` | reads the headers and the body, sets destination and retries, reads the reply's headers and three properties, as the protocol asks |
//! | `follows` | copies out each piece of the reply, where tokens and usage are |

use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::{Action, ContextType};

mod module {
    proxy_wasm::main! {{
        proxy_wasm::set_root_context(|_| Box::new(super::StepsRoot::default()));
    }}
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum StepDepth {
    #[default]
    Passes,
    Reads,
    Speaks,
    Follows,
}

#[derive(Debug, Default)]
struct StepsRoot {
    depth: StepDepth,
    endpoint: String,
}

#[derive(Debug)]
struct StepsStream {
    depth: StepDepth,
    endpoint: String,
}

impl Context for StepsRoot {}

impl RootContext for StepsRoot {
    fn on_configure(&mut self, _size: usize) -> bool {
        let bytes = self.get_plugin_configuration().unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        let Some((depth, endpoint)) = text.split_once(' ') else {
            return false;
        };
        self.depth = match depth {
            "passes" => StepDepth::Passes,
            "reads" => StepDepth::Reads,
            "speaks" => StepDepth::Speaks,
            "follows" => StepDepth::Follows,
            _ => return false,
        };
        endpoint.clone_into(&mut self.endpoint);
        true
    }

    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }

    fn create_http_context(&self, _id: u32) -> Option<Box<dyn HttpContext>> {
        Some(Box::new(StepsStream {
            depth: self.depth,
            endpoint: self.endpoint.clone(),
        }))
    }
}

impl Context for StepsStream {}

impl HttpContext for StepsStream {
    fn on_http_request_headers(&mut self, _count: usize, last: bool) -> Action {
        if self.depth == StepDepth::Speaks {
            std::hint::black_box(self.get_http_request_headers_bytes());
        }
        if matches!(self.depth, StepDepth::Passes | StepDepth::Follows) || last {
            Action::Continue
        } else {
            Action::Pause
        }
    }

    fn on_http_request_body(&mut self, size: usize, last: bool) -> Action {
        if matches!(self.depth, StepDepth::Passes | StepDepth::Follows) {
            return Action::Continue;
        }
        if !last {
            return Action::Pause;
        }
        std::hint::black_box(self.get_http_request_body(0, size));
        if self.depth == StepDepth::Speaks {
            self.set_http_request_header("x-gateway-destination-endpoint", Some(&self.endpoint));
            self.set_http_request_header(
                "x-envoy-retry-on",
                Some("connect-failure,reset,retriable-status-codes"),
            );
            self.set_http_request_header("x-envoy-max-retries", Some("2"));
        }
        Action::Continue
    }

    fn on_http_response_headers(&mut self, _count: usize, _last: bool) -> Action {
        if self.depth == StepDepth::Speaks {
            std::hint::black_box(self.get_http_response_headers_bytes());
            for path in [
                ["upstream", "address"],
                ["upstream", "request_attempt_count"],
                ["response", "code_details"],
            ] {
                std::hint::black_box(self.get_property(path.to_vec()));
            }
        }
        Action::Continue
    }

    fn on_http_response_body(&mut self, size: usize, _last: bool) -> Action {
        if self.depth == StepDepth::Follows {
            std::hint::black_box(self.get_http_response_body(0, size));
        }
        Action::Continue
    }
}
