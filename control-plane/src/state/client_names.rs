//! Decides to which pools a proxy's client certificate gives access.

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;
use std::sync::Arc;

use crate::state::peer::Origin;

/// A name of client certificates that gives access to one pool, or to every pool if no pool is
/// given.
///
/// A name is written `NAME` or `POOL=NAME`. `*=NAME` means `NAME`, and is for names that contain a
/// `=`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientName {
    pool: Option<String>,
    name: String,
}

/// The client certificates that give access to pools.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ClientNames {
    /// Every client that may connect gets every pool.
    #[default]
    Any,
    /// Only clients with these names get pools.
    Listed {
        /// Names that give access to every pool.
        every_pool: BTreeSet<String>,
        /// Names that give access to one pool, by pool.
        pools: BTreeMap<String, BTreeSet<String>>,
    },
}

/// The pools that a proxy or an Envoy requests.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RequestedPools {
    /// Pools that this daemon serves and allows for this client.
    pub allowed: Vec<String>,
    /// Pools that this daemon serves, but not for this client.
    pub refused: Vec<String>,
    /// Pools that this daemon does not serve.
    pub unknown: Vec<String>,
}

// === impl ClientName ===

impl FromStr for ClientName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (pool, name) = match text.split_once('=') {
            Some(("*", name)) => (None, name),
            Some((pool, name)) => (Some(pool), name),
            None => (None, text),
        };
        if name.is_empty() || pool.is_some_and(str::is_empty) {
            return Err("give the name in a certificate as NAME, or as POOL=NAME".to_owned());
        }
        Ok(Self {
            pool: pool.map(str::to_owned),
            name: name.to_owned(),
        })
    }
}

// === impl ClientNames ===

impl ClientNames {
    /// Allows exactly these names. Without names, allows any client.
    ///
    /// # Errors
    /// Fails if a name is for a pool that this daemon does not serve.
    pub fn try_new(names: Vec<ClientName>, served: &[Arc<str>]) -> Result<Self, String> {
        if names.is_empty() {
            return Ok(Self::Any);
        }
        let mut every_pool = BTreeSet::new();
        let mut pools: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for ClientName { pool, name } in names {
            let Some(pool) = pool else {
                every_pool.insert(name);
                continue;
            };
            if !served.iter().any(|known| **known == *pool) {
                return Err(format!(
                    "--state-tls-client-names {pool}={name}: there is no pool {pool:?}, only {served:?}"
                ));
            }
            pools.entry(pool).or_default().insert(name);
        }
        Ok(Self::Listed { every_pool, pools })
    }

    /// Divides the pools that a client of `origin` requests into allowed, refused and unknown
    /// pools.
    pub fn sort(
        &self,
        requested: impl IntoIterator<Item = String>,
        origin: &Origin,
        served: &[Arc<str>],
    ) -> RequestedPools {
        let mut sorted = RequestedPools::default();
        for pool in requested {
            if !served.iter().any(|known| **known == *pool) {
                sorted.unknown.push(pool);
            } else if self.may_have(origin, &pool) {
                sorted.allowed.push(pool);
            } else {
                sorted.refused.push(pool);
            }
        }
        sorted
    }

    /// Returns whether a client of `origin` has access to at least one pool.
    #[must_use]
    pub fn has_pools(&self, origin: &Origin) -> bool {
        match self {
            Self::Any => true,
            Self::Listed { every_pool, pools } => {
                origin.certificate.as_deref().is_some_and(|name| {
                    every_pool.contains(name) || pools.values().any(|names| names.contains(name))
                })
            }
        }
    }

    fn may_have(&self, origin: &Origin, pool: &str) -> bool {
        match self {
            Self::Any => true,
            Self::Listed { every_pool, pools } => {
                origin.certificate.as_deref().is_some_and(|name| {
                    every_pool.contains(name)
                        || pools.get(pool).is_some_and(|names| names.contains(name))
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served() -> [Arc<str>; 2] {
        ["a".into(), "b".into()]
    }

    fn listed(names: &[&str]) -> ClientNames {
        let names = names.iter().map(|name| name.parse().unwrap()).collect();
        ClientNames::try_new(names, &served()).unwrap()
    }

    fn sorted(names: &ClientNames, certificate: Option<&str>) -> RequestedPools {
        let origin = Origin {
            certificate: certificate.map(Arc::from),
            address: Some([127, 0, 0, 1].into()),
        };
        names.sort(["a", "b", "c"].map(str::to_owned), &origin, &served())
    }

    fn pools(allowed: &[&str], refused: &[&str]) -> RequestedPools {
        let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        RequestedPools {
            allowed: owned(allowed),
            refused: owned(refused),
            unknown: owned(&["c"]),
        }
    }

    #[test]
    fn without_names_every_client_has_every_pool() {
        for certificate in [None, Some("proxy")] {
            assert_eq!(sorted(&listed(&[]), certificate), pools(&["a", "b"], &[]));
        }
    }

    #[test]
    fn a_name_has_its_pools_and_a_client_without_one_has_none() {
        let names = listed(&["gateway", "a=team-a", "*=cn=odd", "b=spiffe://c/ns/b/sa/e"]);
        for (certificate, expected) in [
            (Some("gateway"), pools(&["a", "b"], &[])),
            (Some("cn=odd"), pools(&["a", "b"], &[])),
            (Some("team-a"), pools(&["a"], &["b"])),
            (Some("spiffe://c/ns/b/sa/e"), pools(&["b"], &["a"])),
            (Some("switchpointd"), pools(&[], &["a", "b"])),
            (Some(""), pools(&[], &["a", "b"])),
            (None, pools(&[], &["a", "b"])),
        ] {
            let origin = Origin {
                certificate: certificate.map(Arc::from),
                address: None,
            };
            assert_eq!(names.has_pools(&origin), !expected.allowed.is_empty());
            assert_eq!(sorted(&names, certificate), expected, "{certificate:?}");
        }
    }

    #[test]
    fn a_pool_that_is_not_served_and_a_missing_name_are_refused() {
        let unknown = ClientNames::try_new(vec!["c=x".parse().unwrap()], &served()).unwrap_err();
        assert!(unknown.contains("no pool \"c\""), "{unknown}");
        for text in ["", "=x", "a=", "*="] {
            assert!(text.parse::<ClientName>().is_err(), "{text:?}");
        }
    }
}
