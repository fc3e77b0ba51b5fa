use std::net::IpAddr;

use super::FEW;

/// Sorted by address.
#[derive(Default)]
pub(crate) struct Permissions {
    list: Vec<Permission>,
}

struct Permission {
    ip: IpAddr,
    expires_ms: u64,
}

impl Permissions {
    #[inline]
    pub(crate) fn allow(&self, ip: IpAddr, now_ms: u64) -> bool {
        let found = if self.list.len() <= FEW {
            self.list.iter().find(|permission| permission.ip == ip)
        } else {
            self.position(ip).ok().map(|at| &self.list[at])
        };
        found.is_some_and(|permission| permission.expires_ms > now_ms)
    }

    /// Addresses must be distinct, and expired permissions swept.
    pub(crate) fn room_for(&self, ips: &[IpAddr], most: usize) -> bool {
        let new = ips.iter().filter(|ip| self.position(**ip).is_err()).count();
        self.list.len() + new <= most
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (IpAddr, u64)> + '_ {
        self.list.iter().map(|permission| (permission.ip, permission.expires_ms))
    }

    pub(super) fn until(&self, ip: IpAddr) -> Option<u64> {
        self.position(ip).ok().map(|at| self.list[at].expires_ms)
    }

    pub(super) fn retain(&mut self, keep: impl Fn(IpAddr) -> bool) {
        self.list.retain(|permission| keep(permission.ip));
    }

    pub(super) fn insert(&mut self, ip: IpAddr, expires_ms: u64) {
        match self.position(ip) {
            Ok(at) => self.list[at].expires_ms = expires_ms,
            Err(at) => {
                if self.list.capacity() == 0 {
                    self.list.reserve_exact(1);
                }
                self.list.insert(at, Permission { ip, expires_ms });
            }
        }
    }

    fn position(&self, ip: IpAddr) -> Result<usize, usize> {
        self.list.binary_search_by(|permission| permission.ip.cmp(&ip))
    }
}
