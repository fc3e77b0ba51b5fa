// A TURN server built with pion/turn, for UDP, TCP, TLS and DTLS: `cargo xtask differential` compares its responses with turnpike's.
//
// It runs until it is killed. Its arguments are users, NAME:PASSWORD.
package main

import (
	"crypto/tls"
	"flag"
	"fmt"
	"log"
	"net"
	"strings"
	"sync"

	"github.com/pion/dtls/v3"
	"github.com/pion/turn/v5"
)

// families selects the relay address by family.
type families struct {
	v4, v6 turn.RelayAddressGenerator
}

func (f *families) of(network string) (turn.RelayAddressGenerator, error) {
	switch {
	case strings.HasSuffix(network, "4"):
		return f.v4, nil
	case f.v6 != nil:
		return f.v6, nil
	default:
		return nil, fmt.Errorf("no relay address for %s", network)
	}
}

func (f *families) Validate() error {
	if f.v6 != nil {
		if err := f.v6.Validate(); err != nil {
			return err
		}
	}
	return f.v4.Validate()
}

func (f *families) AllocatePacketConn(config turn.AllocateListenerConfig) (net.PacketConn, net.Addr, error) {
	generator, err := f.of(config.Network)
	if err != nil {
		return nil, nil, err
	}
	return generator.AllocatePacketConn(config)
}

func (f *families) AllocateListener(config turn.AllocateListenerConfig) (net.Listener, net.Addr, error) {
	generator, err := f.of(config.Network)
	if err != nil {
		return nil, nil, err
	}
	return generator.AllocateListener(config)
}

func (f *families) AllocateConn(config turn.AllocateConnConfig) (net.Conn, error) {
	generator, err := f.of(config.Network)
	if err != nil {
		return nil, err
	}
	return generator.AllocateConn(config)
}

// allocations counts the allocations of each user.
type allocations struct {
	sync.Mutex
	of map[string]int
}

func (a *allocations) add(user string, count int) {
	a.Lock()
	defer a.Unlock()
	a.of[user] += count
}

func (a *allocations) less(user string, quota int) bool {
	a.Lock()
	defer a.Unlock()
	return a.of[user] < quota
}

func main() {
	listen := flag.String("listen", "127.0.0.1", "address to listen on (ports 3478 and 5349) and to relay from")
	relay6 := flag.String("relay6", "", "IPv6 address to relay from")
	realm := flag.String("realm", "", "realm")
	deny := flag.String("deny", "", "prefix of peers that are refused")
	ports := flag.String("ports", "49152-65535", "relay ports")
	quota := flag.Int("quota", 0, "allocations per user, 0 for no limit")
	cert := flag.String("cert", "", "certificate")
	key := flag.String("key", "", "its key")
	flag.Parse()
	if err := run(*listen, *relay6, *realm, *deny, *ports, *quota, *cert, *key, flag.Args()); err != nil {
		log.Fatal(err)
	}
	select {}
}

func run(listen, relay6, realm, deny, ports string, quota int, certFile, keyFile string, users []string) error {
	var first, last uint16
	if _, err := fmt.Sscanf(ports, "%d-%d", &first, &last); err != nil {
		return fmt.Errorf("-ports %s: %w", ports, err)
	}
	generator := func(address string) turn.RelayAddressGenerator {
		return &turn.RelayAddressGeneratorPortRange{
			RelayAddress: net.ParseIP(address), Address: address, MinPort: first, MaxPort: last, MaxRetries: 200,
		}
	}
	relay := &families{v4: generator(listen)}
	if relay6 != "" {
		relay.v6 = generator(relay6)
	}
	_, denied, err := net.ParseCIDR(deny)
	if err != nil {
		return err
	}
	permit := func(_ net.Addr, peer net.IP) bool { return !denied.Contains(peer) }

	keys := map[string][]byte{}
	for _, user := range users {
		name, password, _ := strings.Cut(user, ":")
		keys[name] = turn.GenerateAuthKey(name, realm, password)
	}
	certificate, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		return err
	}

	udp, err := net.ListenPacket("udp4", net.JoinHostPort(listen, "3478"))
	if err != nil {
		return err
	}
	tcp, err := net.Listen("tcp4", net.JoinHostPort(listen, "3478"))
	if err != nil {
		return err
	}
	secure, err := tls.Listen("tcp4", net.JoinHostPort(listen, "5349"), &tls.Config{
		Certificates: []tls.Certificate{certificate},
		NextProtos:   []string{"stun.turn"},
	})
	if err != nil {
		return err
	}
	datagrams, err := dtls.ListenWithOptions("udp4", &net.UDPAddr{IP: net.ParseIP(listen), Port: 5349},
		// dimpl offers SRTP to every server, and pion refuses a client without a common profile.
		dtls.WithCertificates(certificate), dtls.WithSRTPProtectionProfiles(dtls.SRTP_AES128_CM_HMAC_SHA1_80))
	if err != nil {
		return err
	}

	counted := allocations{of: map[string]int{}}
	config := turn.ServerConfig{
		Realm: realm,
		AuthHandler: func(request *turn.RequestAttributes) (string, []byte, bool) {
			key, ok := keys[request.Username]
			return request.Username, key, ok && request.Realm == realm
		},
		EventHandler: turn.EventHandler{
			OnAllocationCreated: func(_, _ net.Addr, _, user, _ string, _ net.Addr, _ int) { counted.add(user, 1) },
			OnAllocationDeleted: func(_, _ net.Addr, _, user, _ string) { counted.add(user, -1) },
		},
		PacketConnConfigs: []turn.PacketConnConfig{
			{PacketConn: udp, RelayAddressGenerator: relay, PermissionHandler: permit},
		},
	}
	if quota > 0 {
		config.QuotaHandler = func(user, _ string, _ net.Addr) bool { return counted.less(user, quota) }
	}
	for _, listener := range []net.Listener{tcp, secure, datagrams} {
		config.ListenerConfigs = append(config.ListenerConfigs,
			turn.ListenerConfig{Listener: listener, RelayAddressGenerator: relay, PermissionHandler: permit})
	}
	_, err = turn.NewServer(config)
	return err
}
