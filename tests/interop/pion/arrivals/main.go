// Starts pion clients of a TURN server at a fixed rate. Each allocates once and leaves; one JSON object summarises
// the results. The time to the allocation is measured from the moment at which a client was due, and includes its
// connection and handshake. Exit status: 0, all clients got an allocation; 1, not all did.
package main

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/pion/dtls/v3"
	"github.com/pion/logging"
	"github.com/pion/turn/v5"
)

type result struct {
	Attempts int            `json:"attempts"`
	Relayed  int            `json:"relayed"`
	P50      float64        `json:"p50_ms"`
	P99      float64        `json:"p99_ms"`
	Max      float64        `json:"max_ms"`
	Failures map[string]int `json:"failures"`
}

type arrivals struct {
	server, transport, user, password string
	roots                             *x509.CertPool
	loggers                           logging.LoggerFactory
}

func main() {
	var a arrivals
	flag.StringVar(&a.server, "server", "127.0.0.1:3478", "TURN server")
	flag.StringVar(&a.transport, "transport", "udp", "udp, tcp, tls or dtls")
	flag.StringVar(&a.user, "user", "", "username")
	flag.StringVar(&a.password, "password", "", "password")
	ca := flag.String("ca", "", "file with the trusted certificate")
	count := flag.Int("count", 100, "clients")
	rate := flag.Float64("rate", 20, "clients per second")
	flag.Parse()

	// Refused clients are counted, not logged.
	factory := logging.NewDefaultLoggerFactory()
	factory.DefaultLogLevel = logging.LogLevelDisabled
	a.loggers = factory
	if *ca != "" {
		pem, err := os.ReadFile(*ca)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		a.roots = x509.NewCertPool()
		a.roots.AppendCertsFromPEM(pem)
	}

	res := a.run(*count, *rate)
	if err := json.NewEncoder(os.Stdout).Encode(res); err != nil || res.Relayed != res.Attempts {
		os.Exit(1)
	}
}

func (a *arrivals) run(count int, rate float64) result {
	res := result{Attempts: count, Failures: map[string]int{}}
	var times []float64
	var lock sync.Mutex
	var clients sync.WaitGroup
	start := time.Now()
	for number := range count {
		due := start.Add(time.Duration(float64(number) / rate * float64(time.Second)))
		time.Sleep(time.Until(due))
		clients.Add(1)
		go func() {
			defer clients.Done()
			err := a.arrive()
			took := float64(time.Since(due).Microseconds()) / 1000
			lock.Lock()
			defer lock.Unlock()
			if err != nil {
				res.Failures[err.Error()]++
				return
			}
			times = append(times, took)
		}()
	}
	clients.Wait()
	slices.Sort(times)
	res.Relayed = len(times)
	if len(times) > 0 {
		at := func(share float64) float64 { return times[int(share*float64(len(times)-1))] }
		res.P50, res.P99, res.Max = at(0.5), at(0.99), at(1)
	}
	return res
}

// arrive allocates as a new client and returns once it succeeds; the client then leaves in the background.
func (a *arrivals) arrive() error {
	socket, err := a.connect()
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	client, err := turn.NewClient(&turn.ClientConfig{
		STUNServerAddr: a.server,
		TURNServerAddr: a.server,
		Username:       a.user,
		Password:       a.password,
		Conn:           socket,
		LoggerFactory:  a.loggers,
	})
	if err != nil {
		_ = socket.Close()
		return err
	}
	if err := client.Listen(); err != nil {
		_ = socket.Close()
		return err
	}
	relay, err := client.Allocate()
	go func() {
		if relay != nil {
			_ = relay.Close()
		}
		client.Close()
		_ = socket.Close()
	}()
	return err
}

func (a *arrivals) connect() (net.PacketConn, error) {
	host, _, err := net.SplitHostPort(a.server)
	if err != nil {
		return nil, err
	}
	switch a.transport {
	case "udp":
		return net.ListenPacket("udp", net.JoinHostPort(host, "0"))
	case "tcp":
		stream, err := net.Dial("tcp", a.server)
		if err != nil {
			return nil, err
		}
		return turn.NewSTUNConn(stream), nil
	case "tls":
		stream, err := tls.Dial("tcp", a.server, &tls.Config{RootCAs: a.roots, ServerName: host})
		if err != nil {
			return nil, err
		}
		return turn.NewSTUNConn(stream), nil
	case "dtls":
		server, err := net.ResolveUDPAddr("udp", a.server)
		if err != nil {
			return nil, err
		}
		stream, err := dtls.Dial("udp", server, &dtls.Config{RootCAs: a.roots, ServerName: host, LoggerFactory: a.loggers})
		if err != nil {
			return nil, err
		}
		return turn.NewSTUNConn(stream), nil
	default:
		return nil, fmt.Errorf("no transport %q", a.transport)
	}
}
