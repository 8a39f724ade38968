//! The sources of pools and their endpoints, from the command line or the pools file, with host
//! names resolved.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;

use discovery::{Instance, LocalAddresses, SetChanges};

use crate::cli::args::EndpointsArgs;
use crate::error::FatalError;
use crate::pool::discovery_source::{self, FollowedEndpoints};
use crate::pool::objects::ObjectsSource;
use crate::pool::pools_file::{self, EndpointsSource, PoolSource};

/// Returns the configured pools.
///
/// # Errors
/// Returns [`FatalError::Usage`] when the pools file cannot be used.
pub async fn pools(
    from: EndpointsArgs,
    pool: String,
    config: Option<PathBuf>,
    objects: ObjectsSource,
) -> Result<Vec<PoolSource>, FatalError> {
    let EndpointsArgs {
        endpoints_file,
        endpoint,
        pools,
    } = from;
    if let Some(path) = pools {
        return pools_file::read(&path, &objects)
            .await
            .map_err(FatalError::Usage);
    }
    let endpoints = endpoints_file.map_or(EndpointsSource::List(endpoint), EndpointsSource::File);
    Ok(vec![PoolSource {
        name: pool,
        endpoints,
        config,
        objects,
    }])
}

/// Opens the source of a pool's endpoints.
///
/// # Errors
/// Returns [`FatalError::Usage`] when a host name cannot be resolved, the list is invalid, or a
/// discovery source cannot be set up. An invalid file or an unreachable cluster is not an error,
/// because the source is watched.
pub async fn open(
    source: EndpointsSource,
    local: LocalAddresses,
) -> Result<FollowedEndpoints, FatalError> {
    let given = match source {
        EndpointsSource::File(path) => {
            return Ok(without_components(discovery::file::follow(path, local)));
        }
        EndpointsSource::Discovered(discovered) => {
            return discovery_source::open(discovered, local)
                .await
                .map_err(FatalError::Usage);
        }
        EndpointsSource::List(given) => given,
    };
    let mut instances = Vec::with_capacity(given.len());
    for name in given {
        let address = resolve(&name).await?;
        instances.push(Instance::new(name, address));
    }
    discovery::validate(&instances).map_err(FatalError::Usage)?;
    Ok(without_components(discovery::fixed(instances)))
}

fn without_components(changes: SetChanges) -> FollowedEndpoints {
    FollowedEndpoints {
        changes,
        components: Vec::new(),
    }
}

/// Resolves `HOST:PORT`. Envoy gets addresses, never names, so the address in the picker's header
/// equals that of the host. A name with several addresses is refused, because these may be several
/// servers, or one server with several addresses.
///
/// # Errors
/// Returns [`FatalError::Usage`] if the name cannot be used.
pub async fn resolve(given: &str) -> Result<SocketAddr, FatalError> {
    let unusable = |why: String| FatalError::Usage(format!("endpoint {given:?}: {why}"));
    if !given
        .rsplit_once(':')
        .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
    {
        return Err(unusable("give HOST:PORT, IPv6 in brackets".to_owned()));
    }
    let found = tokio::net::lookup_host(given)
        .await
        .map_err(|e| unusable(e.to_string()))?;
    let all: BTreeSet<SocketAddr> = found.collect();
    // The IPv4 and IPv6 loopback addresses are the same server, so the IPv6 address is used only
    // without an IPv4 address.
    let has_ipv4 = all.iter().any(SocketAddr::is_ipv4);
    let wanted: Vec<SocketAddr> = all
        .into_iter()
        .filter(|address| address.is_ipv4() == has_ipv4)
        .collect();
    match wanted.as_slice() {
        [] => Err(unusable("the name has no address".to_owned())),
        [one] => Ok(*one),
        several => Err(unusable(format!(
            "the name has {} addresses ({several:?}); give one of them",
            several.len()
        ))),
    }
}
