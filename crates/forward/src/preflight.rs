//! Tests the options of a rule's outgoing sockets before binding listeners. Otherwise, a source
//! address that this machine does not have, or a missing privilege, would be noticed only when
//! connections fail.

use std::io;

use socket2::{Domain, Socket, Type};

use crate::{Host, Rule, StartError};

/// Creates a socket with the rule's options and closes it.
pub(crate) fn check(rule: &Rule) -> Result<(), StartError> {
    let Rule { source, device, mark, transparent, .. } = rule;
    if source.is_none() && device.is_none() && mark.is_none() && !transparent {
        return Ok(());
    }
    let v6 = match (source, rule.targets.first().map(|target| &target.host)) {
        (Some(source), _) => source.ip().is_ipv6(),
        (None, Some(Host::Ip(target))) => target.is_ipv6(),
        _ => false,
    };
    let refuse = |what: String, source: io::Error, remedy| StartError::Outgoing {
        rule: rule.id.0.clone(),
        what,
        source,
        remedy,
    };
    // UDP suffices for every protocol, because the options are the same and no packet is sent.
    let socket = Socket::new(if v6 { Domain::IPV6 } else { Domain::IPV4 }, Type::DGRAM, None)
        .map_err(|error| refuse("at all".to_owned(), error, "raise the limit on open files (ulimit -n)"))?;
    if let Some(device) = device {
        socket.bind_device(Some(device.as_bytes())).map_err(|error| {
            let remedy = match error.kind() {
                io::ErrorKind::PermissionDenied => "grant CAP_NET_RAW (setcap cap_net_raw=ep)",
                _ => "choose an interface of this machine (ip link)",
            };
            refuse(format!("through device {device}"), error, remedy)
        })?;
    }
    if let Some(mark) = mark {
        socket.set_mark(*mark).map_err(|error| refuse(format!("with mark {mark}"), error, ADMIN))?;
    }
    if *transparent {
        let set = if v6 { socket.set_ip_transparent_v6(true) } else { socket.set_ip_transparent_v4(true) };
        set.map_err(|error| refuse("from the clients' own addresses".to_owned(), error, ADMIN))?;
    }
    if let Some(source) = source {
        socket.bind(&source.at(0).into()).map_err(|error| {
            refuse(format!("from {source}"), error, "choose an address of this machine (ip address)")
        })?;
    }
    Ok(())
}

const ADMIN: &str = "grant CAP_NET_ADMIN (setcap cap_net_admin=ep)";

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl FnOnce(&mut Rule)) -> String {
        let mut rule = crate::testing::rule("r", ([127, 0, 0, 1], 9).into());
        change(&mut rule);
        check(&rule).map_or_else(|error| error.to_string(), |()| "nothing".to_owned())
    }

    #[test]
    fn rule_without_socket_options_is_not_tested() {
        assert_eq!(refused(|_| ()), "nothing");
    }

    #[test]
    fn source_address_of_another_machine_is_reported() {
        assert_eq!(refused(|rule| rule.source = Some([127, 0, 0, 9].into())), "nothing");
        // No machine has this documentation address (RFC 5737).
        let told = refused(|rule| rule.source = Some([203, 0, 113, 1].into()));
        assert!(told.starts_with("rule r: cannot send from 203.0.113.1: "), "{told}");
        assert!(told.ends_with("; choose an address of this machine (ip address)"), "{told}");
    }

    #[test]
    fn missing_device_is_reported() {
        assert_eq!(refused(|rule| rule.device = Some("lo".to_owned())), "nothing");
        let told = refused(|rule| rule.device = Some("no-such-device".to_owned()));
        assert!(told.contains("cannot send through device no-such-device: "), "{told}");
    }
}
