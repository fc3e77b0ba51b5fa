//! Binding requests from RFC 3489 clients, which do not send the magic cookie (RFC 5389 section 12.2).

use turnpike_wire::stun::{Class, Header, View, Writer, kind, method};

use crate::{
    server::{
        DropReason, Policy, RequestRefusal, Server, Source, Transport, Verdict,
        request::{
            MAX_REQUEST_LEN, Method, Request, nat_discovery::unknown_in_plain_binding,
            response::reason_phrase,
        },
    },
    time::Now,
};

impl<P: Policy> Server<P> {
    /// Over UDP, a 20-byte request gets a response of 32 bytes, or 44 over IPv6. Over DTLS, RFC 8489 section
    /// 11 requires a 500 for every such request; stream framing rejects RFC 3489 messages before they get
    /// here.
    pub(crate) fn classic(&mut self, now: Now, source: &Source, datagram: &[u8]) -> Verdict<'_> {
        if datagram.len() > MAX_REQUEST_LEN {
            return self.data.dropped(DropReason::Oversized);
        }
        let view = match View::new_checked_classic(datagram) {
            Ok(view) => view,
            Err(invalid) => return self.data.dropped(invalid.into()),
        };
        let header = view.header();
        let transport = self.config.listener(source.client.listener).transport;
        if header.class == Class::Request && transport == Transport::Dtls {
            self.data.stats.error(500);
            let mut response = Writer::begin(&mut self.reply, header.answered(Class::Error));
            response.error(500, reason_phrase(500));
            response.finish_classic(in_place_of_cookie(datagram));
            return Verdict::Reply { client: source.client, link: source.link, bytes: &self.reply };
        }
        if header.class != Class::Request || header.method != method::BINDING || transport != Transport::Udp {
            return self.data.dropped(DropReason::ClassicStun);
        }
        self.classic_binding(now, source, &Request { method: Method::Binding, view }, header)
    }

    /// RFC 5389 section 12.2 treats CHANGE-REQUEST and RESPONSE-ADDRESS as unknown attributes. Some clients
    /// send a CHANGE-REQUEST without flags with every request, which is harmless. A CHANGE-REQUEST with flags
    /// is silently ignored: pystun3 would repeat the request in a tight loop after an error, and Debian's
    /// `stun` believes that any response came from the other address.
    fn classic_binding(
        &mut self,
        now: Now,
        source: &Source,
        request: &Request<'_>,
        header: Header,
    ) -> Verdict<'_> {
        let Source { client, link } = *source;
        let mut unknown = unknown_in_plain_binding(request);
        if unknown.contains(&kind::CHANGE_REQUEST) {
            return self.data.dropped(DropReason::ClassicStun);
        }
        self.data.stats.requests[Method::Binding as usize] += 1;
        let response = if unknown.is_empty() {
            self.data.stats.successes[Method::Binding as usize] += 1;
            let mut response = Writer::begin(&mut self.reply, header.answered(Class::Success));
            response.address(kind::MAPPED_ADDRESS, client.address);
            response
        } else {
            let why = RequestRefusal::UnknownAttribute(unknown[0]);
            self.tell_stranger_refused(now, &client, ("", request.method), 420, why);
            self.data.stats.error(420);
            // RFC 3489 section 11.2.10: if the number of attributes is odd, one is repeated.
            let first = unknown[0];
            unknown.extend((unknown.len() % 2 == 1).then_some(first));
            let mut response = Writer::begin(&mut self.reply, header.answered(Class::Error));
            response.error(420, "").unknown_attributes(&unknown);
            response
        };
        response.finish_classic(in_place_of_cookie(request.view.bytes()));
        match self.may_answer(now, &client) {
            Ok(()) => Verdict::Reply { client, link, bytes: &self.reply },
            Err(reason) => self.unanswered(now, source, request, reason),
        }
    }
}

fn in_place_of_cookie(message: &[u8]) -> [u8; 4] {
    [message[4], message[5], message[6], message[7]]
}
