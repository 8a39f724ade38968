//! The bearer token of the admin listener.

use std::path::PathBuf;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use discovery::file_watcher::{self, FileWatcher};
use subtle::ConstantTimeEq;
use tokio::sync::watch;

use crate::error::error_text;
use crate::serve::console;
use crate::shutdown::Shutdown;

/// Paths that need no token, because probes do not have one.
const OPEN: [&str; 2] = ["/livez", "/readyz"];

/// The minimum number of bytes of a token. A token of 128 bits in hexadecimal has twice as many.
const TOKEN_BYTES_MIN: usize = 16;

/// The token in force.
#[derive(Clone, Debug)]
pub struct BearerToken(watch::Receiver<Arc<str>>);

// === impl BearerToken ===

impl BearerToken {
    /// Reads the file, and again when it changes. Invalid new content is logged, and the old token
    /// stays valid.
    ///
    /// # Errors
    /// Fails if the file cannot be read, or has no valid token.
    pub async fn follow(file: PathBuf, mut shutdown: Shutdown) -> Result<Self, String> {
        let first = token(&file_watcher::read(&file).await.map_err(error_text)?)
            .map_err(|why| format!("{}: {why}", file.display()))?;
        let (sender, receiver) = watch::channel(first);
        let mut follow = FileWatcher::new(&file);
        let _ = follow.changed().await; // the first content was just read
        tokio::spawn(async move {
            loop {
                let changed = tokio::select! {
                    changed = follow.changed() => changed,
                    () = shutdown.begun() => return,
                };
                match changed
                    .map_err(error_text)
                    .and_then(|text| token(&text).map_err(str::to_owned))
                {
                    Ok(token) => {
                        sender.send_replace(token);
                        tracing::info!(file = %file.display(), "new admin token in force");
                    }
                    Err(why) => {
                        tracing::error!(why, file = %file.display(), "the new admin token cannot be used; the old one stays");
                    }
                }
            }
        });
        Ok(Self(receiver))
    }

    fn admits(&self, headers: &HeaderMap) -> bool {
        let given = headers
            .get(header::AUTHORIZATION)
            .and_then(|value| value.as_bytes().split_first_chunk::<7>());
        given.is_some_and(|(scheme, token)| {
            scheme.eq_ignore_ascii_case(b"bearer ")
                && bool::from(token.ct_eq(self.0.borrow().as_bytes()))
        })
    }
}

/// Refuses requests without the token. Probes need no token. The files of the console need none
/// either, because they hold no data.
pub async fn guard(State(token): State<BearerToken>, request: Request, next: Next) -> Response {
    let path = request.uri().path();
    if OPEN.contains(&path) || console::is_asset(path) || token.admits(request.headers()) {
        return next.run(request).await;
    }
    (
        StatusCode::UNAUTHORIZED,
        [(header::WWW_AUTHENTICATE, "Bearer")],
        "this needs the token of --admin-token-file\n",
    )
        .into_response()
}

fn token(text: &str) -> Result<Arc<str>, &'static str> {
    let token = text.trim();
    if token.len() < TOKEN_BYTES_MIN {
        return Err("a token has at least 16 characters");
    }
    Ok(Arc::from(token))
}
