//! The five questions.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use turnpike_config::restapi_credentials;

use crate::setup::{
    answers::{Answers, Certificate, CertificateSource, ClientAccess, HttpsPort, OrNone},
    args::SetupArgs,
    dialogue::Dialogue,
    error::SetupError,
    machine::{self, Machine},
};

const PORT: u16 = 3478;

const NAME: &str = "1. DNS name of this server, or none";
const CERTIFICATE: &str =
    "2. Certificate: automatic (Let's Encrypt; you accept its terms), none, or a file with the chain";
const ACCESS: &str = "3. Users: secret (shared with Nextcloud Talk, Synapse, Jitsi, ...), api (an application asks for credentials), or user:NAME";
const FREE_HTTPS: &str =
    "4. Port 443, which strict firewalls allow: yes, no, or the address of a web server to share it with";
const TAKEN_HTTPS: &str = "4. Port 443, which another program uses. To share it with a web server, first move the web server to another address, and \
     enter that address here. Otherwise, answer no";
const PUBLIC: &str = "5. Public address of a NAT in front of this machine, or none";

pub(crate) fn ask(
    args: &SetupArgs,
    dialogue: &mut Dialogue<'_>,
    machine: &Machine,
    random: [u8; 32],
) -> Result<(Answers, Vec<IpAddr>), SetupError> {
    let name = dialogue.answer(args.name.clone(), NAME, OrNone(None))?.0;
    let source = match (&name, &args.certificate) {
        (None, None) => CertificateSource::None,
        (_, flag) => dialogue.answer(flag.clone(), CERTIFICATE, CertificateSource::Automatic)?,
    };
    if name.is_none() && source != CertificateSource::None {
        return SetupError::answer("--certificate needs --name: clients verify the name in the certificate");
    }
    let certificate = certificate(source, args, dialogue)?;
    let access = dialogue.answer(args.access.clone(), ACCESS, ClientAccess::Secret)?;
    let https = https(args, dialogue, machine, &certificate)?;
    let named = machine::resolve(name.as_ref());
    let public = match &args.public_address {
        Some(OrNone(given)) => *given,
        None => dialogue.answer(None, PUBLIC, OrNone(machine.public(&named)))?.0,
    };
    let answers = Answers {
        name,
        certificate,
        access,
        https,
        public,
        relay_ports: args.relay_ports.clone(),
        listen: if args.listen.is_empty() { default_listeners() } else { args.listen.clone() },
        secret: restapi_credentials::new_secret(random),
    };
    Ok((answers, named))
}

fn certificate(
    source: CertificateSource,
    args: &SetupArgs,
    dialogue: &mut Dialogue<'_>,
) -> Result<Certificate, SetupError> {
    match source {
        CertificateSource::None => Ok(Certificate::None),
        CertificateSource::Automatic => {
            let question = "   Email address for notices from the certificate authority, or none";
            let contact =
                dialogue.answer(args.email.clone().map(Some).map(OrNone), question, OrNone(None))?.0;
            Ok(Certificate::Automatic { contact })
        }
        CertificateSource::File(cert) => {
            let beside = cert.with_file_name("privkey.pem");
            let key = match &args.key {
                Some(key) => key.clone(),
                None if beside.is_file() => beside,
                None if dialogue.is_interactive() => {
                    let default = beside.display().to_string();
                    dialogue.answer(None, "   Private key of the certificate", default)?.into()
                }
                None => {
                    let missing = format!("--key is missing: the private key of {}", cert.display());
                    return SetupError::answer(missing);
                }
            };
            let absolute = |path| std::path::absolute(path).map_err(SetupError::Dialogue);
            Ok(Certificate::Files { cert: absolute(cert)?, key: absolute(key)? })
        }
    }
}

fn https(
    args: &SetupArgs,
    dialogue: &mut Dialogue<'_>,
    machine: &Machine,
    certificate: &Certificate,
) -> Result<HttpsPort, SetupError> {
    let is_taken = args.port_443.is_none() && machine.is_https_taken();
    let has_certificate = *certificate != Certificate::None;
    let is_useful = has_certificate && !is_taken && args.listen.is_empty();
    let default = if is_useful { HttpsPort::Yes } else { HttpsPort::No };
    let question = if is_taken { TAKEN_HTTPS } else { FREE_HTTPS };
    let answer = dialogue.answer(args.port_443, question, default)?;
    if matches!(answer, HttpsPort::Shared(_)) && !has_certificate {
        return SetupError::answer(
            "--port-443 with a web server needs --certificate: the server recognizes its own clients by the name in it",
        );
    }
    Ok(answer)
}

fn default_listeners() -> Vec<SocketAddr> {
    let v6: Option<SocketAddr> = machine::has_ipv6().then(|| (Ipv6Addr::UNSPECIFIED, PORT).into());
    [SocketAddr::from((Ipv4Addr::UNSPECIFIED, PORT))].into_iter().chain(v6).collect()
}
