//! Text for the administrator after the file is written: settings for applications, and firewall rules.

use std::{fs, net::SocketAddr};

use turnpike_config::{Firewall, FirewallFormat, Settings};

use crate::setup::answers::{Answers, Certificate, ClientAccess};

/// Settings for applications, which reach the server at `host`.
pub(crate) fn applications(answers: &Answers, settings: &Settings, host: &str) -> String {
    let secret = answers.secret.reveal();
    let port = answers.port();
    let tls = answers.tls_port();
    let shown = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    let mut uris = vec![format!("turn:{shown}:{port}"), format!("turn:{shown}:{port}?transport=tcp")];
    uris.extend(tls.map(|port| format!("turns:{shown}:{port}?transport=tcp")));
    let uris = uris.iter().map(|uri| format!("{uri:?}")).collect::<Vec<_>>().join(", ");
    match &answers.access {
        ClientAccess::User(name) => {
            format!("Username and password, also in the file: {name} {secret}\n  URIs: {uris}\n")
        }
        ClientAccess::Api => {
            let (scheme, host) = match answers.certificate {
                Certificate::Files { .. } => ("https", shown),
                Certificate::None | Certificate::Automatic { .. } => ("http", "127.0.0.1".to_owned()),
            };
            let port = settings.credentials.listen.first().map_or(0, SocketAddr::port);
            format!(
                "Once the server runs, create a key for each application: sudo turnpike key add NAME\n  \
                 It requests credentials from {scheme}://{host}:{port}/v1/credentials (docs/credentials.md)\n"
            )
        }
        ClientAccess::Secret => {
            let (kinds, best) = tls.map_or(("turn", port), |port| ("turn,turns", port));
            let turns = tls.map_or_else(String::new, |port| {
                format!(
                    "\n      {{ type = \"turns\", host = \"{host}\", port = {port}, transport = \"tcp\", secret = true, ttl = 86400, \
                     algorithm = \"turn\" }},"
                )
            });
            format!(
                "Shared secret, also in the file: {secret}\n  \
                 Nextcloud Talk:  occ talk:turn:add --secret={secret} {kinds} {shown}:{best} udp,tcp\n  \
                 Synapse:         turn_shared_secret: \"{secret}\"\n                   turn_uris: [{uris}]\n  \
                 Jitsi Meet:      external_service_secret = \"{secret}\"\n    external_services = {{\n      \
                 {{ type = \"turn\", host = \"{host}\", port = {port}, transport = \"udp\", secret = true, ttl = 86400, algorithm = \
                 \"turn\" }},{turns}\n    }}\n  \
                 Others, as with coturn's use-auth-secret: {uris} (docs/recipes.md)\n"
            )
        }
    }
}

/// Rules for ufw if it is enabled, else for nftables.
pub(crate) fn firewall(settings: &Settings) -> String {
    let ufw = fs::read_to_string("/etc/ufw/ufw.conf").unwrap_or_default();
    let is_ufw = ufw.lines().any(|line| line.trim() == "ENABLED=yes");
    let format = if is_ufw { FirewallFormat::Ufw } else { FirewallFormat::Nftables };
    let rules = Firewall::of_server(settings).show(format);
    format!(
        "Firewall rules, also needed in the cloud's firewall or on the router (turnpike print-firewall):\n{rules}"
    )
}
