import java.net.DatagramPacket;
import java.util.List;
import java.util.concurrent.atomic.AtomicLong;
import java.util.logging.Level;
import java.util.logging.Logger;

import org.ice4j.Transport;
import org.ice4j.TransportAddress;
import org.ice4j.ice.Agent;
import org.ice4j.ice.CandidatePair;
import org.ice4j.ice.CandidateType;
import org.ice4j.ice.Component;
import org.ice4j.ice.IceMediaStream;
import org.ice4j.ice.KeepAliveStrategy;
import org.ice4j.ice.LocalCandidate;
import org.ice4j.ice.RemoteCandidate;
import org.ice4j.ice.harvest.TurnCandidateHarvester;
import org.ice4j.security.LongTermCredential;

/**
 * Two ice4j agents that know only each other's relayed address exchange messages.
 *
 * Usage: {@code java -cp 'lib/*' Call.java TRANSPORT HOST PORT USERNAME PASSWORD SECONDS}. It prints {@code version NAMES}, then every 250 ms
 * {@code MS SENT RECEIVED SENT RECEIVED}: the time since the call began, and the messages of each end so far.
 */
public final class Call {
    private static final int INTERVAL_MS = 60;
    private static final int REPORT_MS = 250;
    private static final int DEADLINE_MS = 20_000;

    private static final class End {
        final Agent agent = new Agent();
        final IceMediaStream stream = agent.createMediaStream("call");
        final Component component;
        final AtomicLong sent = new AtomicLong();
        final AtomicLong received = new AtomicLong();

        End(boolean controlling, TransportAddress server, LongTermCredential credential) throws Exception {
            agent.setControlling(controlling);
            agent.addCandidateHarvester(new TurnCandidateHarvester(server, credential));
            component = agent.createComponent(stream, KeepAliveStrategy.SELECTED_ONLY, true);
        }

        void meet(End other) {
            String fragment = other.agent.getLocalUfrag();
            stream.setRemoteUfrag(fragment);
            stream.setRemotePassword(other.agent.getLocalPassword());
            for (LocalCandidate candidate : other.component.getLocalCandidates()) {
                if (candidate.getType() == CandidateType.RELAYED_CANDIDATE) {
                    component.addRemoteCandidate(new RemoteCandidate(
                            candidate.getTransportAddress(), component, candidate.getType(), candidate.getFoundation(),
                            candidate.getPriority(), null, fragment));
                }
            }
        }

        boolean isConnected() {
            CandidatePair pair = component.getSelectedPair();
            return pair != null && pair.getLocalCandidate().getType() == CandidateType.RELAYED_CANDIDATE;
        }

        void talk() {
            byte[] message = "message".getBytes();
            try {
                while (true) {
                    component.send(message, 0, message.length);
                    sent.incrementAndGet();
                    Thread.sleep(INTERVAL_MS);
                }
            } catch (Exception error) {
                fail(error);
            }
        }

        void listen() {
            try {
                while (true) {
                    component.getSocket().receive(new DatagramPacket(new byte[1500], 1500));
                    received.incrementAndGet();
                }
            } catch (Exception error) {
                fail(error);
            }
        }
    }

    private static void fail(Object why) {
        System.err.println(why);
        System.exit(1);
    }

    private static void start(Runnable work) {
        Thread thread = new Thread(work);
        thread.setDaemon(true);
        thread.start();
    }

    public static void main(String[] arguments) throws Exception {
        Transport transport = Transport.parse(arguments[0]);
        TransportAddress server = new TransportAddress(arguments[1], Integer.parseInt(arguments[2]), transport);
        LongTermCredential credential = new LongTermCredential(arguments[3], arguments[4]);
        long length = 1000 * Long.parseLong(arguments[5]);
        Logger.getLogger("").setLevel(Level.WARNING);
        // Otherwise it asks a cloud metadata service for its address and waits for the response.
        System.setProperty("ice4j.harvest.mapping.aws.enabled", "false");
        System.setProperty("ice4j.harvest.use-ipv6", "false");
        String jar = Agent.class.getProtectionDomain().getCodeSource().getLocation().getPath();
        System.out.println("version ice4j " + jar.replaceAll(".*/ice4j-|\\.jar$", ""));

        End a = new End(true, server, credential);
        End b = new End(false, server, credential);
        a.meet(b);
        b.meet(a);
        List<End> ends = List.of(a, b);
        for (End end : ends) {
            end.agent.startConnectivityEstablishment();
        }
        long deadline = System.currentTimeMillis() + DEADLINE_MS;
        while (!a.isConnected() || !b.isConnected()) {
            if (System.currentTimeMillis() > deadline) {
                fail("no connection: " + a.agent.getState() + ", " + b.agent.getState());
            }
            Thread.sleep(10);
        }
        for (End end : ends) {
            start(end::talk);
            start(end::listen);
        }
        while (a.received.get() == 0 || b.received.get() == 0) {
            Thread.sleep(10);
        }
        long began = System.currentTimeMillis();
        for (long elapsed = 0; elapsed < length; Thread.sleep(REPORT_MS)) {
            elapsed = System.currentTimeMillis() - began;
            System.out.println(elapsed + " " + a.sent + " " + a.received + " " + b.sent + " " + b.received);
        }
        System.exit(0);
    }
}
