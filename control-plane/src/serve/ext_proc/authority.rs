//! The Service that a gateway calls, by the `:authority` of its gRPC stream.
//!
//! An InferencePool names the Service of its picker. A gateway that reads the InferencePool opens a
//! cluster for that Service. The authority is the value that the gateway set in Envoy, or the name
//! of the cluster if the gateway set none. So pools that share a daemon need no metadata if each
//! names its own Service or port.
//!
//! | gateway | authority |
//! |---|---|
//! | Envoy AI Gateway, kgateway | `switchpointd.prod.svc:9002` |
//! | Envoy Gateway | `switchpointd.prod:9002` |
//! | a cluster or an authority written by hand | `switchpointd.prod.svc.cluster.local:9002` |

use std::collections::BTreeMap;
use std::sync::Arc;

use discovery::BackendStatus;
use discovery::backend::PickerService;
use ext_proc::ServiceDirectory;
use tokio::sync::watch;

use crate::pool::discovery_source::WatchedComponents;

/// The status of the source of each discovered pool. The status names the Service of the picker.
#[derive(Debug)]
pub struct PickerServices(Vec<(Arc<str>, watch::Receiver<BackendStatus>)>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceAuthority<'a> {
    name: &'a str,
    namespace: &'a str,
    port: Option<u16>,
}

// === impl PickerServices ===

impl PickerServices {
    #[must_use]
    pub fn new(components: &BTreeMap<Arc<str>, WatchedComponents>) -> Self {
        let of_pool = |(name, components): (&Arc<str>, &WatchedComponents)| {
            let sources = components.iter();
            sources
                .map(|(_, followed)| (Arc::clone(name), followed.status()))
                .collect::<Vec<_>>()
        };
        Self(components.iter().flat_map(of_pool).collect())
    }
}

impl ServiceDirectory for PickerServices {
    fn pool_of_service(&self, authority: &str) -> Option<Arc<str>> {
        let service = ServiceAuthority::parse(authority)?;
        let is_picker = |status: &watch::Receiver<BackendStatus>| {
            let status = status.borrow();
            let picker = status
                .requirements
                .as_ref()
                .and_then(|of_pool| of_pool.picker.as_ref());
            picker.is_some_and(|picker| service.names_service(picker))
        };
        let mut pools = self
            .0
            .iter()
            .filter(|(_, status)| is_picker(status))
            .map(|(pool, _)| Arc::clone(pool));
        pools.next().filter(|_| pools.next().is_none())
    }
}

// === impl ServiceAuthority ===

impl<'a> ServiceAuthority<'a> {
    /// Parses an authority; `None` if it does not name a Service.
    #[must_use]
    pub fn parse(authority: &'a str) -> Option<Self> {
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) => (host, Some(port.parse().ok()?)),
            None => (authority, None),
        };
        let mut labels = host.split('.');
        let name = labels.next()?;
        let namespace = labels.next()?;
        let service = labels.next().is_none_or(|kind| kind == "svc");
        (service && !name.is_empty() && !namespace.is_empty()).then_some(Self {
            name,
            namespace,
            port,
        })
    }

    /// Returns whether the authority names `service`. A missing port matches any port.
    #[must_use]
    pub fn names_service(&self, service: &PickerService) -> bool {
        let port = self.port.is_none() || service.port.is_none() || self.port == service.port;
        port && *service.name == *self.name && *service.namespace == *self.namespace
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_differ_by_name_namespace_and_port() {
        let service = |name: &str, port| PickerService {
            namespace: "prod".into(),
            name: name.into(),
            port,
        };
        let parsed = |authority| ServiceAuthority::parse(authority).unwrap();
        for authority in [
            "epp.prod.svc:9002",
            "epp.prod.svc.cluster.local:9002",
            "epp.prod.svc",
            "epp.prod.svc.example.com",
            "epp.prod:9002",
        ] {
            assert!(
                parsed(authority).names_service(&service("epp", Some(9002))),
                "{authority}"
            );
            assert!(
                parsed(authority).names_service(&service("epp", None)),
                "{authority}"
            );
            assert!(
                !parsed(authority).names_service(&service("other", Some(9002))),
                "{authority}"
            );
        }
        assert!(!parsed("epp.prod.svc:9012").names_service(&service("epp", Some(9002))));
        assert!(!parsed("epp.test.svc:9002").names_service(&service("epp", Some(9002))));
    }

    #[test]
    fn what_is_no_service_names_none() {
        for authority in [
            "",
            "switchpoint-ext-proc",
            "10.0.0.1:9002",
            "[::1]:9002",
            "epp:9002",
            "epp.prod.com:1",
            ".prod.svc",
            ".prod",
            "epp.prod.svc:x",
        ] {
            assert_eq!(ServiceAuthority::parse(authority), None, "{authority:?}");
        }
    }
}
