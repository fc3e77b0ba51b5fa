// Relays TCP (RFC 6062) through a TURN server with pion's client, v4 or v5, and prints one JSON object about it.
//
// In both directions: the client connects to a peer of this program that echoes (Connect), and peers of this program connect to the
// relayed address (ConnectionAttempt). All connections are open at the same time. Everything sent must come back unchanged, and the
// peers must see the relayed address.
// Exit status: 0, everything was echoed; 1, not everything was.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"github.com/pion/logging"
	v4 "github.com/pion/turn/v4"
	v5 "github.com/pion/turn/v5"
)

type result struct {
	Relayed   string   `json:"relayed"`
	Connected int      `json:"connected"`
	Accepted  int      `json:"accepted"`
	HeardFrom []string `json:"heard_from"`
}

// relay is the part of an allocation that both versions share.
type relay struct {
	address net.Addr
	dial    func(peer *net.TCPAddr) (net.Conn, error)
	accept  func() (net.Conn, error)
	permit  func(peer net.Addr) error
	close   func()
}

const patience = 10 * time.Second

func main() {
	server := flag.String("server", "127.0.0.1:3478", "TURN server")
	username := flag.String("user", "", "username")
	password := flag.String("password", "", "password")
	version := flag.Int("version", 4, "pion/turn, 4 or 5")
	count := flag.Int("count", 4, "connections each way")
	flag.Parse()

	var res result
	err := run(*version, *server, *username, *password, *count, &res)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	if err := json.NewEncoder(os.Stdout).Encode(res); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if err != nil {
		os.Exit(1)
	}
}

func run(version int, server, username, password string, count int, res *result) error {
	control, err := net.Dial("tcp", server)
	if err != nil {
		return err
	}
	defer control.Close()
	allocate := map[int]func(net.Conn, string, string, string) (relay, error){4: allocateV4, 5: allocateV5}[version]
	if allocate == nil {
		return fmt.Errorf("no version %d", version)
	}
	relay, err := allocate(control, server, username, password)
	if err != nil {
		return err
	}
	defer relay.close()
	res.Relayed = relay.address.String()

	var open []net.Conn
	defer func() {
		for _, conn := range open {
			conn.Close()
		}
	}()
	for number := 0; number < count; number++ {
		// A peer for each connection, because RFC 6062 allows only one connection per peer.
		peer, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		defer peer.Close()
		from := make(chan string, 1)
		go echo(peer, from)
		conn, err := relay.dial(peer.Addr().(*net.TCPAddr))
		if err != nil {
			return fmt.Errorf("dial %d: %w", number, err)
		}
		open = append(open, conn)
		if err := exchange(conn, conn, number); err != nil {
			return fmt.Errorf("dial %d: %w", number, err)
		}
		res.Connected++
		res.hear(<-from)
	}
	for number := 0; number < count; number++ {
		if err := relay.permit(&net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1}); err != nil {
			return err
		}
		peer, err := net.DialTimeout("tcp", res.Relayed, patience)
		if err != nil {
			return err
		}
		open = append(open, peer)
		conn, err := relay.accept()
		if err != nil {
			return fmt.Errorf("accept %d: %w", number, err)
		}
		open = append(open, conn)
		if err := exchange(peer, conn, number); err != nil {
			return fmt.Errorf("accept %d: %w", number, err)
		}
		if err := exchange(conn, peer, number); err != nil {
			return fmt.Errorf("accept %d, back: %w", number, err)
		}
		res.Accepted++
		res.hear(peer.RemoteAddr().String())
	}
	return nil
}

func allocateV4(control net.Conn, server, username, password string) (relay, error) {
	client, err := v4.NewClient(&v4.ClientConfig{
		STUNServerAddr: server, TURNServerAddr: server, Username: username, Password: password,
		Conn: v4.NewSTUNConn(control), LoggerFactory: logging.NewDefaultLoggerFactory(),
	})
	if err != nil {
		return relay{}, err
	}
	if err := client.Listen(); err != nil {
		return relay{}, err
	}
	allocation, err := client.AllocateTCP()
	if err != nil {
		return relay{}, err
	}
	dial := func(peer *net.TCPAddr) (net.Conn, error) { return allocation.DialTCP("tcp", nil, peer) }
	permit := func(peer net.Addr) error { return client.CreatePermission(peer) }
	return relay{allocation.Addr(), dial, allocation.Accept, permit, client.Close}, nil
}

func allocateV5(control net.Conn, server, username, password string) (relay, error) {
	client, err := v5.NewClient(&v5.ClientConfig{
		STUNServerAddr: server, TURNServerAddr: server, Username: username, Password: password,
		Conn: v5.NewSTUNConn(control), LoggerFactory: logging.NewDefaultLoggerFactory(),
	})
	if err != nil {
		return relay{}, err
	}
	if err := client.Listen(); err != nil {
		return relay{}, err
	}
	allocation, err := client.AllocateTCP()
	if err != nil {
		return relay{}, err
	}
	dial := func(peer *net.TCPAddr) (net.Conn, error) { return allocation.DialTCP("tcp", nil, peer) }
	permit := func(peer net.Addr) error { return client.CreatePermission(peer) }
	return relay{allocation.Addr(), dial, allocation.Accept, permit, client.Close}, nil
}

// exchange writes bytes that are unique to this number to one end, and reads them at the other.
func exchange(to, from net.Conn, number int) error {
	sent := make([]byte, 100_000)
	for i := range sent {
		sent[i] = byte(i*7 + i>>8 + number)
	}
	if err := from.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	wrote := make(chan error, 1)
	go func() {
		_, err := to.Write(sent)
		wrote <- err
	}()
	heard := make([]byte, len(sent))
	if _, err := io.ReadFull(from, heard); err != nil {
		return err
	}
	if string(heard) != string(sent) {
		return fmt.Errorf("different bytes came back")
	}
	return <-wrote
}

// echo returns the bytes of the first connection, and reports its source.
func echo(peer net.Listener, from chan<- string) {
	conn, err := peer.Accept()
	if err != nil {
		return
	}
	defer conn.Close()
	from <- conn.RemoteAddr().String()
	io.Copy(conn, conn)
}

func (res *result) hear(from string) {
	for _, known := range res.HeardFrom {
		if known == from {
			return
		}
	}
	res.HeardFrom = append(res.HeardFrom, from)
}
