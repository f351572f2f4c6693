// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/wording"
)

// transferCounts are the numbers of downloads, and of uploads, of each size to a TCP service. The
// many small transfers show how connections spread over servers; the large ones test long
// connections.
var transferCounts = map[Size]int{1e3: 16, 100e3: 6, 1e6: 3, 10e6: 1}

const (
	// datagramCount is the number of datagrams to a UDP service.
	datagramCount = 40
	datagramSize  = Size(1200)
	// serviceWorkers is the number of simultaneous requests to a service.
	serviceWorkers = 2
	// transferTimeout is the timeout of one transfer or datagram. It allows for one or two
	// retransmissions.
	transferTimeout = 15 * time.Second
)

// direction is the direction in which a check transfers data.
type direction string

const (
	download direction = "download"
	upload   direction = "upload"
	echo     direction = "echo" // there and back
)

// check is one request of the demo, and its result. To a TCP service it is a download or an upload
// on a connection of its own. To a UDP service it is a datagram, which the server echoes.
type check struct {
	number    int
	service   Service
	direction direction
	size      Size
	server    string // the name of the server that answered; empty if none did
	err       error
}

// bytes returns the number of bytes that the check has transferred correctly.
func (c check) bytes() int {
	switch {
	case c.err != nil:
		return 0
	case c.direction == echo:
		return 2 * int(c.size)
	}
	return int(c.size)
}

// demo is the state of one run of Lab.Demo.
type demo struct {
	lab    *Lab
	client http.Client
	checks []check
}

// giveUpAfter is the number of failures after which the remaining checks of a service are left out.
// Otherwise, if a service does not work at all, the demo would wait for the timeouts of all its
// checks.
const giveUpAfter = 4

var errNotTried = errors.New("not tried")

// Demo sends requests from the lab's client to every service. The requests are downloads and
// uploads of several sizes, whose checksums are compared, and datagrams that servers echo.
func (l *Lab) Demo(ctx context.Context) (*DemoResult, error) {
	d := demo{lab: l, checks: l.checks()}
	d.client.Transport = &http.Transport{DialContext: l.Node("client").Dial, DisableKeepAlives: true}
	l.progress(fmt.Sprintf("Sending %s, each on its own connection.",
		wording.Count(len(d.checks), "request")))
	before, err := l.balancerTraffic()
	if err != nil {
		return nil, err
	}
	d.run(ctx)
	if ctx.Err() != nil {
		return nil, errors.New("demo interrupted")
	}
	after, err := l.balancerTraffic()
	if err != nil {
		return nil, err
	}
	for name, t := range before {
		after[name] = after[name].since(t)
	}
	offers, err := l.Offers()
	if err != nil {
		return nil, err
	}
	return d.result(after, offers), nil
}

// checks returns all checks of the demo, service by service.
func (l *Lab) checks() []check {
	var checks []check
	add := func(times int, c check) {
		for range times {
			c.number = len(checks)
			checks = append(checks, c)
		}
	}
	for _, s := range l.Topology.Services {
		if s.Protocol == desired.UDP {
			add(datagramCount, check{service: s, direction: echo, size: datagramSize})
			continue
		}
		for _, size := range Sizes {
			add(transferCounts[size], check{service: s, direction: download, size: size})
			add(transferCounts[size], check{service: s, direction: upload, size: size})
		}
	}
	return checks
}

// run runs all checks, and returns when they have ended. It runs the checks of different services
// at the same time. d.checks has the checks of a service one after the other.
func (d *demo) run(ctx context.Context) {
	var wait sync.WaitGroup
	for rest := d.checks; len(rest) > 0; {
		end := slices.IndexFunc(rest, func(c check) bool {
			return c.service.Name != rest[0].service.Name
		})
		if end < 0 { // all remaining checks are of one service
			end = len(rest)
		}
		ofService := rest[:end]
		wait.Go(func() { d.runService(ctx, ofService) })
		rest = rest[end:]
	}
	wait.Wait()
}

// runService runs the checks of one service, serviceWorkers at a time. After giveUpAfter failures
// it does not run the remaining checks: they fail with errNotTried. When the context ends, it
// leaves out the remaining checks, and they have no result.
func (d *demo) runService(ctx context.Context, checks []check) {
	todo := make(chan *check)
	var failures atomic.Int32
	var wait sync.WaitGroup
	for range serviceWorkers {
		wait.Go(func() {
			for c := range todo {
				if failures.Load() >= giveUpAfter {
					c.err = errNotTried
					continue
				}
				d.do(ctx, c)
				if c.err != nil {
					failures.Add(1)
				}
			}
		})
	}
	for i := range checks {
		if ctx.Err() == nil {
			todo <- &checks[i]
		}
	}
	close(todo)
	wait.Wait()
}

// do runs one check and stores its result.
func (d *demo) do(ctx context.Context, c *check) {
	ctx, cancel := context.WithTimeout(ctx, transferTimeout)
	defer cancel()
	switch c.direction {
	case download:
		c.server, c.err = d.download(ctx, c)
	case upload:
		c.server, c.err = d.upload(ctx, c)
	case echo:
		c.server, c.err = d.echo(ctx, c)
	}
}

// request sends an HTTP request on a connection of its own. It returns the name of the server that
// answered, and the body. It returns an error unless the response has the expected status.
func (d *demo) request(req *http.Request, status int) (server string, body []byte, err error) {
	resp, err := d.client.Do(req)
	if err != nil {
		return "", nil, err
	}
	defer resp.Body.Close()
	server = resp.Header.Get("X-Segue-Server")
	if node := d.lab.Node(server); node == nil || node.Role != RoleServer {
		return "", nil, fmt.Errorf("the response does not name a server: X-Segue-Server is %q", server)
	}
	body, err = io.ReadAll(resp.Body)
	if err != nil {
		return server, body, fmt.Errorf("after %d bytes: %w", len(body), err)
	}
	if resp.StatusCode != status {
		return server, body, fmt.Errorf("the server answered %q", resp.Status)
	}
	return server, body, nil
}

// download requests the file of the check's size.
func (d *demo) download(ctx context.Context, c *check) (server string, err error) {
	target := fmt.Sprintf("http://%s/%s", c.service.Address(), c.size)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, target, nil)
	if err != nil {
		return "", err
	}
	server, body, err := d.request(req, http.StatusOK)
	if err != nil {
		return server, err
	}
	return server, compare(body, Content(c.size))
}

// upload sends a file, compares it with the file that the server has stored, and removes the stored
// one.
func (d *demo) upload(ctx context.Context, c *check) (server string, err error) {
	content := Content(c.size)
	name := fmt.Sprintf("demo-%d", c.number)
	target := fmt.Sprintf("http://%s/upload/%s", c.service.Address(), name)
	req, err := http.NewRequestWithContext(ctx, http.MethodPut, target, bytes.NewReader(content))
	if err != nil {
		return "", err
	}
	server, _, err = d.request(req, http.StatusCreated)
	if err != nil {
		return server, err
	}
	path := d.lab.Node(server).UploadPath(name)
	stored, err := os.ReadFile(path)
	if err != nil {
		return server, fmt.Errorf("check the stored file: %w", err)
	}
	return server, errors.Join(compare(stored, content), os.Remove(path))
}

// compare returns an error unless the received bytes equal the sent ones in length and SHA-256.
func compare(arrived, sent []byte) error {
	if len(arrived) != len(sent) {
		return fmt.Errorf("received %d of %d bytes", len(arrived), len(sent))
	}
	if a, s := sha256.Sum256(arrived), sha256.Sum256(sent); a != s {
		return fmt.Errorf("the received bytes differ from the sent bytes: SHA-256 %x…, want %x…",
			a[:4], s[:4])
	}
	return nil
}

// echo sends a datagram, and compares it with the server's answer.
func (d *demo) echo(ctx context.Context, c *check) (server string, err error) {
	conn, err := d.lab.Node("client").Dial(ctx, "udp", c.service.Address().String())
	if err != nil {
		return "", err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Now()) })
	defer stop()
	content := Content(c.size)
	if _, err := conn.Write(content); err != nil {
		return "", err
	}
	buf := make([]byte, 64<<10)
	n, err := conn.Read(buf)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return "", context.DeadlineExceeded
	}
	if err != nil {
		return "", err
	}
	server, reply, _ := strings.Cut(string(buf[:n]), "\n")
	return server, compare([]byte(reply), content)
}

// traffic counts the traffic that a balancer has received.
type traffic struct {
	packets, bytes uint64
	placed         map[desired.Protocol]uint64 // flows that it has placed; empty in a bare lab
}

// since returns t minus the earlier counts in before. The result and t share the map placed, so
// since changes the map of t, too.
func (t traffic) since(before traffic) traffic {
	t.packets -= before.packets
	t.bytes -= before.bytes
	for protocol, flows := range before.placed {
		t.placed[protocol] -= flows
	}
	return t
}

// balancerTraffic returns the traffic that the fabric has sent to each balancer since the lab was
// built, and the flows that the balancer's own counters report as placed.
func (l *Lab) balancerTraffic() (map[string]traffic, error) {
	received := make(map[string]traffic)
	err := l.Node("fabric").netlink(func(h *netlink.Handle) error {
		for _, name := range l.balancers() {
			port, err := h.LinkByName(name)
			if err != nil {
				return fmt.Errorf("fabric: port %s: %w", name, err)
			}
			placed, err := l.placedFlows(name)
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			stats := port.Attrs().Statistics
			received[name] = traffic{stats.TxPackets, stats.TxBytes, placed}
		}
		return nil
	})
	return received, err
}

// placedFlows returns the number of flows that a balancer of Segue has placed. It reads them from
// the maps of the balancer's data path.
func (l *Lab) placedFlows(name string) (map[desired.Protocol]uint64, error) {
	placed := make(map[desired.Protocol]uint64)
	if !l.Topology.RunsSegue() {
		return placed, nil
	}
	view, err := inspect.OpenView(l.Node(name).Instance())
	if err != nil {
		return nil, err
	}
	defer view.Close()
	state, err := view.Snapshot()
	if err != nil {
		return nil, err
	}
	for _, service := range state.Services {
		for _, server := range service.Servers {
			placed[service.Protocol] += server.Placed
		}
	}
	return placed, nil
}

// DemoResult has the counts of a demo. Bytes, here and in DemoService and DemoServer, counts the
// bytes of files and datagrams that were transferred correctly.
type DemoResult struct {
	Requests  int            `json:"requests"`
	Failed    int            `json:"failed"`
	Bytes     int            `json:"bytes"`
	Services  []DemoService  `json:"services"` // in the order of the topology
	Servers   []DemoServer   `json:"servers"`
	Offers    []Offers       `json:"offers"` // of services with placement hunt
	Balancers []DemoBalancer `json:"balancers"`
	Failures  []string       `json:"failures"` // in words; equal ones once
}

// DemoService counts the requests to a service.
type DemoService struct {
	Name          string                `json:"name"`
	Protocol      desired.Protocol      `json:"protocol"`
	Address       netip.AddrPort        `json:"address"`
	Encapsulation desired.Encapsulation `json:"encapsulation"`
	Requests      int                   `json:"requests"`
	Failed        int                   `json:"failed"`
	Bytes         int                   `json:"bytes"`
	Servers       []string              `json:"servers"` // the names of servers that have answered
}

// DemoServer counts the requests that a server has answered. A request over TCP is a connection.
type DemoServer struct {
	Name        string `json:"name"`
	Connections int    `json:"tcp_connections"`
	Datagrams   int    `json:"udp_datagrams"`
	Bytes       int    `json:"bytes"`
}

// DemoBalancer counts what a balancer has received. Connections and Flows count what the balancer
// has placed on servers. They are 0 unless the lab runs Segue.
type DemoBalancer struct {
	Name        string `json:"name"`
	Connections uint64 `json:"tcp_connections"`
	Flows       uint64 `json:"udp_flows"`
	Packets     uint64 `json:"packets"`
	Bytes       uint64 `json:"bytes"` // of the packets with their Ethernet headers
}

// result adds up the checks. received is the traffic of each balancer during the demo.
func (d *demo) result(received map[string]traffic, offers []Offers) *DemoResult {
	r := &DemoResult{
		Requests: len(d.checks), Failures: d.failures(),
		Offers: append([]Offers{}, offers...), // in JSON an empty list, not null
	}
	for _, c := range d.checks {
		r.Bytes += c.bytes()
		if c.err != nil {
			r.Failed++
		}
	}
	for _, s := range d.lab.Topology.Services {
		r.Services = append(r.Services, d.ofService(s))
	}
	for _, spec := range d.lab.Topology.specs(RoleServer) {
		r.Servers = append(r.Servers, d.ofServer(spec.Name))
	}
	for _, name := range d.lab.balancers() {
		t := received[name]
		r.Balancers = append(r.Balancers, DemoBalancer{
			name, t.placed[desired.TCP], t.placed[desired.UDP], t.packets, t.bytes,
		})
	}
	return r
}

func (d *demo) ofService(s Service) DemoService {
	r := DemoService{
		Name: s.Name, Protocol: s.Protocol, Address: s.Address(), Encapsulation: s.Encapsulation,
		Servers: []string{},
	}
	for _, c := range d.checks {
		if c.service.Name != s.Name {
			continue
		}
		r.Requests++
		r.Bytes += c.bytes()
		if c.err != nil {
			r.Failed++
		} else if !slices.Contains(r.Servers, c.server) {
			r.Servers = append(r.Servers, c.server)
		}
	}
	slices.Sort(r.Servers)
	return r
}

// ofServer adds up the checks that a server has answered.
func (d *demo) ofServer(name string) DemoServer {
	r := DemoServer{Name: name}
	for _, c := range d.checks {
		switch {
		case c.server != name:
			continue
		case c.direction == echo:
			r.Datagrams++
		default:
			r.Connections++
		}
		r.Bytes += c.bytes()
	}
	return r
}

// Err returns an error if a request has failed.
func (r *DemoResult) Err() error {
	if r.Failed > 0 {
		return fmt.Errorf("demo failed: %d of %s", r.Failed, wording.Count(r.Requests, "request"))
	}
	return nil
}

// Summary returns a sentence about a demo without failures.
func (r *DemoResult) Summary() string {
	return fmt.Sprintf("Demo passed: %s over %s, %.0f MB, every byte correct.",
		wording.Count(r.Requests, "request"), wording.Count(len(r.Services), "service"),
		megabytes(r.Bytes))
}

// megabytes converts an amount of data into units of 10^6 bytes.
func megabytes[N int | uint64](bytes N) float64 { return float64(bytes) / 1e6 }

// Write prints tables of services, servers, offers and balancers, and the failures.
func (r *DemoResult) Write(w io.Writer) {
	fmt.Fprintln(w)
	r.writeServices(w)
	r.writeServers(w)
	writeOffers(w, r.Offers)
	r.writeBalancers(w)
	if len(r.Failures) > 0 {
		fmt.Fprintln(w, "Failures:")
		for _, f := range r.Failures {
			fmt.Fprintln(w, "  "+f)
		}
		fmt.Fprintln(w)
	}
}

// writeServices prints the table of services and an empty line. Its last column is the number of
// servers that have answered, of all servers.
func (r *DemoResult) writeServices(w io.Writer) {
	table := newTable(w)
	fmt.Fprintln(table, "service\taddress\tencapsulation\trequests\tfailed\tMB\tservers\t")
	for _, s := range r.Services {
		fmt.Fprintf(table, "%s\t%s %s\t%s\t%d\t%d\t%.1f\t%d of %d\t\n",
			s.Name, s.Protocol, s.Address, cmp.Or(s.Encapsulation, "-"),
			s.Requests, s.Failed, megabytes(s.Bytes), len(s.Servers), len(r.Servers))
	}
	table.Flush()
	fmt.Fprintln(w)
}

func (r *DemoResult) writeServers(w io.Writer) {
	table := newTable(w)
	fmt.Fprintln(table, "server\tTCP connections\tUDP datagrams\tMB\t")
	for _, s := range r.Servers {
		fmt.Fprintf(table, "%s\t%d\t%d\t%.1f\t\n", s.Name, s.Connections, s.Datagrams, megabytes(s.Bytes))
	}
	table.Flush()
	fmt.Fprintln(w)
}

func (r *DemoResult) writeBalancers(w io.Writer) {
	table := newTable(w)
	fmt.Fprintln(table, "balancer\tTCP connections\tUDP flows\tpackets\tMB\t")
	for _, b := range r.Balancers {
		fmt.Fprintf(table, "%s\t%d\t%d\t%d\t%.1f\t\n", b.Name, b.Connections, b.Flows, b.Packets,
			megabytes(b.Bytes))
	}
	table.Flush()
	fmt.Fprintln(w)
}

// failures describes the failed checks in the order of the checks. If several checks have the same
// description, it is in the result only once, with their number.
func (d *demo) failures() []string {
	times := make(map[string]int)
	failures := []string{}
	for _, c := range d.checks {
		if c.err == nil {
			continue
		}
		text := fmt.Sprintf("%s (%s): ", c.service.Name, c.service.Encapsulation)
		if c.err == errNotTried {
			text += fmt.Sprintf("skipped after %d failures", giveUpAfter)
		} else {
			text += fmt.Sprintf("%s of %s: %s", c.direction, c.size, plain(c.err))
		}
		if c.server != "" {
			text += ", at server " + c.server
		}
		if times[text] == 0 {
			failures = append(failures, text)
		}
		times[text]++
	}
	for i, text := range failures {
		if times[text] > 1 {
			failures[i] += fmt.Sprintf(" (%d times)", times[text])
		}
	}
	return failures
}

// plain returns the text of a check's error. It leaves out the URL and the address that Go adds, as
// the description of the check names the service. It replaces Go's "context deadline exceeded" by a
// text that says how long the check waited.
func plain(err error) string {
	if request, ok := errors.AsType[*url.Error](err); ok {
		err = request.Err
	}
	if operation, ok := errors.AsType[*net.OpError](err); ok && operation.Op == "dial" {
		err = operation.Err
	}
	if err == context.DeadlineExceeded { // nothing has arrived
		return fmt.Sprintf("no answer within %v", transferTimeout)
	}
	late := fmt.Sprintf("incomplete after %v", transferTimeout)
	return strings.ReplaceAll(err.Error(), context.DeadlineExceeded.Error(), late)
}
