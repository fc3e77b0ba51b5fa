// Relays an echo through a TURN server with pion's client, and prints one JSON object about it.
//
// The peer is a plain UDP socket of this program. Every payload must come back unchanged, once, from the peer's own
// address. pion sends the first datagrams as Send indications while it binds a channel, so both ways are used.
// Over TLS the certificate must be signed by -ca and valid for the server's address.
// Exit status: 0, all were echoed; 1, not all were echoed; 4, the server refused (the JSON then has pion's error in `refused`).
package main

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/pion/logging"
	"github.com/pion/turn/v4"
)

type result struct {
	Sent      int      `json:"sent"`
	Echoed    int      `json:"echoed"`
	Relayed   string   `json:"relayed"`
	Mapped    string   `json:"mapped"`
	Local     string   `json:"local"`
	HeardFrom []string `json:"heard_from"`
	Protocol  string   `json:"protocol,omitempty"`
	Refused   string   `json:"refused,omitempty"`
}

// Odd, word-aligned and near-MTU payloads: ChannelData padding must not appear in the data.
var sizes = map[string][]int{
	"udp": {1, 3, 4, 120, 121, 1200},
	// pion v4.1's STUNConn ignores frames shorter than nine bytes, so ChannelData with up to four bytes of payload, which is eight
	// bytes on a stream, is held back until further data arrives.
	"tcp": {5, 6, 7, 8, 120, 121, 1200},
	"tls": {5, 6, 7, 8, 120, 121, 1200},
}

func main() {
	server := flag.String("server", "127.0.0.1:3478", "TURN server")
	username := flag.String("user", "", "username")
	password := flag.String("password", "", "password")
	transport := flag.String("transport", "udp", "udp, tcp or tls")
	ca := flag.String("ca", "", "file with the trusted certificate")
	count := flag.Int("count", 100, "datagrams to echo")
	peer := flag.String("peer", "127.0.0.1", "address of the peer")
	flag.Parse()

	status, res, err := run(*server, *transport, *ca, *username, *password, *peer, *count)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	if err := json.NewEncoder(os.Stdout).Encode(res); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(status)
}

func run(server, transport, ca, username, password, at string, count int) (int, result, error) {
	res := result{Sent: count}
	socket, err := connect(server, transport, ca, &res)
	if err != nil {
		return 1, res, err
	}
	defer socket.Close()
	res.Local = socket.LocalAddr().String()

	client, err := turn.NewClient(&turn.ClientConfig{
		STUNServerAddr: server,
		TURNServerAddr: server,
		Username:       username,
		Password:       password,
		Conn:           socket,
		LoggerFactory:  logging.NewDefaultLoggerFactory(),
	})
	if err != nil {
		return 1, res, err
	}
	defer client.Close()
	if err := client.Listen(); err != nil {
		return 1, res, err
	}
	mapped, err := client.SendBindingRequest()
	if err != nil {
		return 1, res, err
	}
	res.Mapped = mapped.String()

	relay, err := client.Allocate()
	if err != nil {
		res.Refused = err.Error()
		return 4, res, nil
	}
	defer relay.Close()
	res.Relayed = relay.LocalAddr().String()

	// pion requests no address family, so it gets IPv4.
	peer, err := net.ListenPacket("udp", net.JoinHostPort(at, "0"))
	if err != nil {
		return 1, res, err
	}
	heard := make(chan string, count)
	go echo(peer, heard)

	buffer := make([]byte, 2048)
	for number := 0; number < count; number++ {
		payload := make([]byte, sizes[transport][number%len(sizes[transport])])
		for i := range payload {
			payload[i] = byte(number + i)
		}
		if _, err := relay.WriteTo(payload, peer.LocalAddr()); err != nil {
			return 1, res, err
		}
		if err := relay.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
			return 1, res, err
		}
		n, from, err := relay.ReadFrom(buffer)
		if err != nil {
			return 1, res, err
		}
		if !bytes.Equal(buffer[:n], payload) || from.String() != peer.LocalAddr().String() {
			return 1, res, fmt.Errorf("datagram %d came back as %d bytes from %s", number, n, from)
		}
		res.Echoed++
	}
	peer.Close()
	seen := map[string]bool{}
	for from := range heard {
		if !seen[from] {
			seen[from] = true
			res.HeardFrom = append(res.HeardFrom, from)
		}
	}
	return 0, res, nil
}

// connect returns pion's connection to the server: a UDP socket, or a framer on a stream.
func connect(server, transport, ca string, res *result) (net.PacketConn, error) {
	host, _, err := net.SplitHostPort(server)
	if err != nil {
		return nil, err
	}
	switch transport {
	case "udp":
		// On loopback both ends have the same address, which the server sees unchanged.
		if !net.ParseIP(host).IsLoopback() {
			host = ""
		}
		return net.ListenPacket("udp", net.JoinHostPort(host, "0"))
	case "tcp":
		stream, err := net.Dial("tcp", server)
		if err != nil {
			return nil, err
		}
		return turn.NewSTUNConn(stream), nil
	case "tls":
		pem, err := os.ReadFile(ca)
		if err != nil {
			return nil, err
		}
		roots := x509.NewCertPool()
		if !roots.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s: no certificate", ca)
		}
		// RFC 7443: ALPN names the inner protocol.
		config := &tls.Config{RootCAs: roots, ServerName: host, NextProtos: []string{"stun.turn"}}
		stream, err := tls.Dial("tcp", server, config)
		if err != nil {
			return nil, err
		}
		res.Protocol = stream.ConnectionState().NegotiatedProtocol
		return turn.NewSTUNConn(stream), nil
	default:
		return nil, fmt.Errorf("no transport %q", transport)
	}
}

// echo returns datagrams until the socket is closed, and reports their source.
func echo(peer net.PacketConn, heard chan<- string) {
	defer close(heard)
	buffer := make([]byte, 2048)
	for {
		n, from, err := peer.ReadFrom(buffer)
		if err != nil {
			return
		}
		heard <- from.String()
		if _, err := peer.WriteTo(buffer[:n], from); err != nil {
			return
		}
	}
}
