"""Two accounts of PJSIP call each other on loopback; their RTP may only go through a TURN server.

Usage: call.py TRANSPORT HOST PORT USERNAME PASSWORD SECONDS
It prints `version NAMES`, then every 250 ms `MS SENT RECEIVED SENT RECEIVED`: the time since the call began, and the RTP packets of each end so far.
"""

import sys
import time

import pjsua2 as pj

TRANSPORTS = {"udp": pj.PJ_TURN_TP_UDP, "tcp": pj.PJ_TURN_TP_TCP, "tls": pj.PJ_TURN_TP_TLS}


class Call(pj.Call):
    def __init__(self, account, number=pj.PJSUA_INVALID_ID):
        super().__init__(account, number)
        self.audio = None

    def onCallMediaState(self, _):
        info = self.getInfo()
        for medium in info.media:
            if medium.type == pj.PJMEDIA_TYPE_AUDIO and medium.status == pj.PJSUA_CALL_MEDIA_ACTIVE:
                self.audio = medium.index
                # Audio silence, at fifty packets a second.
                pj.Endpoint.instance().audDevManager().getCaptureDevMedia().startTransmit(self.getAudioMedia(medium.index))

    def counts(self):
        """RTP packets sent and received, or None before there are any."""
        if self.audio is None:
            return None
        rtcp = self.getStreamStat(self.audio).rtcp
        return rtcp.txStat.pkt, rtcp.rxStat.pkt


class Account(pj.Account):
    call = None

    def onIncomingCall(self, incoming):
        self.call = Call(self, incoming.callId)
        accepted = pj.CallOpParam(True)
        accepted.statusCode = pj.PJSIP_SC_OK
        self.call.answer(accepted)


def account(name, port, transport, server, username, password):
    config = pj.AccountConfig()
    config.idUri = f"sip:{name}@127.0.0.1:{port}"
    nat = config.natConfig
    nat.iceEnabled = True
    # Only the relayed candidate.
    nat.iceMaxHostCands = 0
    nat.turnEnabled = True
    nat.turnServer = server
    nat.turnConnType = TRANSPORTS[transport]
    nat.turnUserName = username
    nat.turnPassword = password
    nat.turnPasswordType = 0
    made = Account()
    made.create(config)
    return made


def main():
    turn_transport, host, port, username, password, seconds = sys.argv[1:]
    endpoint = pj.Endpoint()
    endpoint.libCreate()
    print("version PJSIP", endpoint.libVersion().full, flush=True)
    config = pj.EpConfig()
    config.logConfig.level = config.logConfig.consoleLevel = 1
    # Callbacks run while this thread waits for events.
    config.uaConfig.threadCnt = 0
    config.uaConfig.mainThreadOnly = True
    # Keeps sending RTP during silence.
    config.medConfig.noVad = True
    endpoint.libInit(config)
    transport = pj.TransportConfig()
    transport.boundAddress = "127.0.0.1"
    number = endpoint.transportCreate(pj.PJSIP_TRANSPORT_UDP, transport)
    local = endpoint.transportGetInfo(number).localName.rsplit(":", 1)[1]
    endpoint.libStart()
    endpoint.audDevManager().setNullDev()
    caller, callee = (account(name, local, turn_transport, f"{host}:{port}", username, password) for name in ("caller", "callee"))
    calling = Call(caller)
    calling.makeCall(f"sip:callee@127.0.0.1:{local}", pj.CallOpParam(True))

    began = None
    due = time.monotonic()
    while began is None or time.monotonic() - began < float(seconds):
        due += 0.25
        while (left := due - time.monotonic()) > 0:
            endpoint.libHandleEvents(int(left * 1000) + 1)
        # The media is also inactive while candidates are being gathered.
        if began is not None and not calling.isActive():
            sys.exit("the call ended")
        ends = [calling.counts(), callee.call and callee.call.counts()]
        if began is None and all(ends) and all(end[1] for end in ends):
            began = time.monotonic()
        if began is not None:
            print(int((time.monotonic() - began) * 1000), *ends[0], *ends[1], flush=True)
    # Calls must end before the library is shut down.
    calling = callee.call = None
    endpoint.libDestroy()


if __name__ == "__main__":
    main()
