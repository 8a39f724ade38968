//! Protects the admin listener from web pages of other sites. A browser of an operator can reach a
//! listener on loopback, so any page that is open in this browser can send requests to the
//! listener.
//!
//! - A page whose own name resolves to this address sends that name as `Host`, so its requests are
//!   refused.
//! - For a page of another site, the browser sends `Origin` or `Sec-Fetch-Site`.
//!
//! Other programs send neither of these two headers and are not affected.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::console;

/// The names under which browsers may reach the admin listener.
#[derive(Clone, Debug)]
pub enum AdminHosts {
    /// Browsers may use any name. A page of another site cannot use the listener: the page lacks
    /// the token that requests need, or the listener's certificate is not valid for the page's
    /// name.
    Any,
    /// Browsers may use addresses, `localhost`, and these names.
    Only(Arc<[String]>),
}

/// Refuses the requests of another site's web page.
pub async fn guard(State(hosts): State<AdminHosts>, request: Request, next: Next) -> Response {
    match refusal(&hosts, &request) {
        Some((status, why)) => (status, why + "\n").into_response(),
        None => next.run(request).await,
    }
}

fn refusal(hosts: &AdminHosts, request: &Request) -> Option<(StatusCode, String)> {
    let headers = request.headers();
    // HTTP/2 has the host in the target, HTTP/1.1 in a header, HTTP/1.0 perhaps nowhere.
    let asked = request
        .uri()
        .authority()
        .map(axum::http::uri::Authority::as_str)
        .or_else(|| text(headers, "host"));
    if let Some(name) = asked.map(without_port).filter(|name| !hosts.admit(name)) {
        let why = format!(
            "this listener is not known as {name:?}: ask by its address or as localhost, or give --admin-host {name}"
        );
        return Some((StatusCode::MISDIRECTED_REQUEST, why));
    }
    let is_foreign = text(headers, "origin").is_some_and(|origin| !is_origin_of(origin, asked))
        || is_from_other_site(request);
    is_foreign.then(|| {
        (
            StatusCode::FORBIDDEN,
            "a page of another site may not use the admin listener".to_owned(),
        )
    })
}

/// Returns whether the browser reports that a page of another site sent this request. Following a
/// link to the console is allowed. Other pages cost the daemon more, and a page of another site
/// could open them again and again.
fn is_from_other_site(request: &Request) -> bool {
    let says = |name| text(request.headers(), name).unwrap_or_default();
    let is_link = *request.method() == Method::GET
        && says("sec-fetch-mode") == "navigate"
        && says("sec-fetch-dest") == "document"
        && console::is_asset(request.uri().path());
    matches!(says("sec-fetch-site"), "cross-site" | "same-site") && !is_link
}

/// Returns whether `origin`, as `http://host:port`, names the host that was called.
fn is_origin_of(origin: &str, asked: Option<&str>) -> bool {
    let own = origin.split_once("://").map(|(_, host)| host);
    own.zip(asked)
        .is_some_and(|(own, asked)| own.eq_ignore_ascii_case(asked))
}

/// Returns the host of `host`, `host:port`, `[v6]` or `[v6]:port`.
fn without_port(authority: &str) -> &str {
    let is_port = |port: &str| !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit());
    match authority
        .strip_prefix('[')
        .and_then(|rest| rest.split_once(']'))
    {
        Some((v6, _)) => v6,
        None => authority
            .rsplit_once(':')
            .filter(|(_, port)| is_port(port))
            .map_or(authority, |(host, _)| host),
    }
}

/// Returns the value of a header. An unreadable value is `?`, which admits nothing.
fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).map(|value| value.to_str().unwrap_or("?"))
}

// === impl AdminHosts ===

impl AdminHosts {
    fn admit(&self, name: &str) -> bool {
        match self {
            Self::Any => true,
            Self::Only(names) => {
                name.parse::<IpAddr>().is_ok()
                    || name.eq_ignore_ascii_case("localhost")
                    || names.iter().any(|known| known.eq_ignore_ascii_case(name))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    fn status(hosts: &AdminHosts, method: &str, headers: &[(&str, &str)]) -> Option<u16> {
        status_of("/", hosts, method, headers)
    }

    fn status_of(
        path: &str,
        hosts: &AdminHosts,
        method: &str,
        headers: &[(&str, &str)],
    ) -> Option<u16> {
        let request = headers.iter().fold(
            axum::http::Request::builder().method(method),
            |all, (name, value)| all.header(*name, *value),
        );
        refusal(hosts, &request.uri(path).body(Body::empty()).unwrap())
            .map(|(status, _)| status.as_u16())
    }

    #[test]
    fn a_page_of_another_site_may_link_only_to_the_console() {
        let link = [
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-mode", "navigate"),
            ("sec-fetch-dest", "document"),
        ];
        let typed = [("sec-fetch-site", "none"), link[1], link[2]];
        for (path, expected) in [
            ("/", None),
            ("/?pool=default", None),
            ("/console.js", None),
            ("/metrics", Some(403)),
            ("/debug/state", Some(403)),
            ("/api/v1/overview", Some(403)),
        ] {
            assert_eq!(
                status_of(path, &AdminHosts::Any, "GET", &link),
                expected,
                "{path}"
            );
            assert_eq!(status_of(path, &AdminHosts::Any, "GET", &typed), None);
        }
    }

    #[test]
    fn only_known_hosts_are_served_without_credentials() {
        let hosts = AdminHosts::Only(Arc::new(["ops.internal".to_owned()]));
        for host in [
            "127.0.0.1:9090",
            "[::1]:9090",
            "[::1]",
            "localhost",
            "LOCALHOST:9090",
            "ops.internal:80",
            "10.0.0.7",
        ] {
            assert_eq!(status(&hosts, "GET", &[("host", host)]), None, "{host}");
        }
        for host in [
            "rebind.example:9090",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "",
            "ops.internal.evil",
            "1.1.1.1:x",
            "\u{e4}",
        ] {
            assert_eq!(
                status(&hosts, "GET", &[("host", host)]),
                Some(421),
                "{host}"
            );
        }
        assert_eq!(status(&hosts, "GET", &[]), None, "HTTP/1.0 without a host");
        assert_eq!(
            status(&AdminHosts::Any, "GET", &[("host", "any.example")]),
            None
        );
    }

    #[test]
    fn pages_of_other_sites_are_refused_and_programs_are_not() {
        let own = ("host", "localhost:9090");
        for (method, headers, expected) in [
            ("POST", &[own][..], None),
            ("POST", &[own, ("origin", "http://localhost:9090")], None),
            (
                "POST",
                &[
                    own,
                    ("origin", "http://localhost:9090"),
                    ("sec-fetch-site", "same-origin"),
                ],
                None,
            ),
            (
                "POST",
                &[own, ("origin", "http://localhost:3000")],
                Some(403),
            ),
            (
                "POST",
                &[own, ("origin", "https://evil.example")],
                Some(403),
            ),
            ("POST", &[own, ("origin", "null")], Some(403)),
            ("POST", &[("origin", "http://localhost:9090")], Some(403)),
            (
                "GET",
                &[
                    own,
                    ("sec-fetch-site", "cross-site"),
                    ("sec-fetch-mode", "no-cors"),
                    ("sec-fetch-dest", "image"),
                ],
                Some(403),
            ),
            (
                "GET",
                &[
                    own,
                    ("sec-fetch-site", "same-site"),
                    ("sec-fetch-mode", "cors"),
                ],
                Some(403),
            ),
            (
                "GET",
                &[
                    own,
                    ("sec-fetch-site", "cross-site"),
                    ("sec-fetch-mode", "navigate"),
                    ("sec-fetch-dest", "iframe"),
                ],
                Some(403),
            ),
            (
                "GET",
                &[
                    own,
                    ("sec-fetch-site", "cross-site"),
                    ("sec-fetch-mode", "navigate"),
                    ("sec-fetch-dest", "document"),
                ],
                None,
            ),
            (
                "POST",
                &[
                    own,
                    ("sec-fetch-site", "cross-site"),
                    ("sec-fetch-mode", "navigate"),
                    ("sec-fetch-dest", "document"),
                ],
                Some(403),
            ),
            (
                "GET",
                &[
                    own,
                    ("sec-fetch-site", "none"),
                    ("sec-fetch-mode", "navigate"),
                ],
                None,
            ),
        ] {
            assert_eq!(
                status(&AdminHosts::Any, method, headers),
                expected,
                "{method} {headers:?}"
            );
        }
    }
}
