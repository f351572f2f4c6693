// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/lab"
)

// browserHost is the name by which browsers know a service's VIP.
const browserHost = "segue.test"

// browser is a Chromium that loads a page.
type browser struct {
	cmd            *exec.Cmd
	page, messages strings.Builder
}

// startChromium lets a browser on the lab's client load a service's page. The browser trusts only
// the public keys with these hashes.
func startChromium(
	t *testing.T, l *lab.Lab, s lab.Service, keys []string, flags ...string,
) *browser {
	t.Helper()
	// Processes of the browser may write to their folder after the first one has ended.
	profile, err := os.MkdirTemp("", "segue-chromium-")
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(profile) })
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	b := &browser{cmd: exec.CommandContext(ctx, "chromium", append(flags,
		"--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
		"--user-data-dir="+profile,
		"--host-resolver-rules=MAP "+browserHost+" "+hostOf(s),
		"--ignore-certificate-errors-spki-list="+strings.Join(keys, ","),
		"--dump-dom", fmt.Sprintf("https://%s:%d/", browserHost, s.Port))...)}
	b.cmd.Stdout, b.cmd.Stderr, b.cmd.WaitDelay = &b.page, &b.messages, patience
	must(t, l.Node("client").Start(b.cmd))
	t.Cleanup(func() { cancel(); _ = b.cmd.Wait() })
	return b
}

// wait waits for the page and all of its resources. It returns the page as it is then.
func (b *browser) wait(t *testing.T) (page string) {
	t.Helper()
	if err := b.cmd.Wait(); err != nil {
		t.Fatalf("chromium: %v: %s", err, &b.messages)
	}
	return b.page.String()
}

// hostOf returns a service's VIP as it is written in a URL.
func hostOf(s lab.Service) string {
	if s.VIP.Is6() {
		return "[" + s.VIP.String() + "]"
	}
	return s.VIP.String()
}

// resources is the number of resources in each half of the page that http2Servers send.
const resources = 6

// http2Servers are servers of HTTP/2 on all servers of a lab, in place of its applications. Their
// page has two halves, of which the second one waits for a change of the servers. The resources of
// a half are scripts that write their names into the page.
type http2Servers struct {
	keys     []string          // hashes of the servers' public keys
	requests chan http2Request // from all servers, in their order
	changed  chan struct{}     // takes a value when the second half may be sent
}

// http2Request describes a request, as the server sees it.
type http2Request struct{ server, client, protocol, path string }

func startHTTP2(t *testing.T, l *lab.Lab) *http2Servers {
	t.Helper()
	s := &http2Servers{
		requests: make(chan http2Request, 100*len(l.Topology.Services)),
		changed:  make(chan struct{}),
	}
	for _, name := range nodes(l, lab.RoleServer) {
		must(t, l.Process(name, string(lab.Nginx)).Stop())
		for _, port := range portsOf(l) {
			s.keys = append(s.keys, s.listen(t, l.Node(name), port))
		}
	}
	return s
}

// portsOf returns the ports of a lab's services, each once.
func portsOf(l *lab.Lab) (ports []uint16) {
	for _, s := range l.Topology.Services {
		ports = append(ports, s.Port.Number())
	}
	slices.Sort(ports)
	return slices.Compact(ports)
}

// listen starts a server on a port of a node. It returns the hash of the server's public key.
func (s *http2Servers) listen(t *testing.T, n *lab.Node, port uint16) (key string) {
	t.Helper()
	listener, err := n.Listen(t.Context(), "tcp", fmt.Sprintf(":%d", port))
	must(t, err)
	server := httptest.NewUnstartedServer(s.handler(n.Name))
	must(t, server.Listener.Close())
	server.Listener, server.EnableHTTP2 = listener, true
	server.StartTLS()
	t.Cleanup(server.Close)
	return keyHash(server.Certificate())
}

// keyHash returns the hash of a certificate's public key, by which Chromium can be told to trust
// it.
func keyHash(certificate *x509.Certificate) string {
	sum := sha256.Sum256(certificate.RawSubjectPublicKeyInfo)
	return base64.StdEncoding.EncodeToString(sum[:])
}

func (s *http2Servers) handler(server string) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, r *http.Request) {
		writeHalf(w, "before")
		_ = http.NewResponseController(w).Flush()
		select {
		case <-s.changed:
			writeHalf(w, "after")
		case <-r.Context().Done():
		}
	})
	mux.HandleFunc("GET /script/{name}", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/javascript")
		fmt.Fprintf(w, "document.write('<p>%s</p>') // %s",
			r.PathValue("name"), strings.Repeat(".", 50_000))
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.requests <- http2Request{server, r.RemoteAddr, r.Proto, r.URL.Path}
		mux.ServeHTTP(w, r)
	})
}

// writeHalf writes a half of the page.
func writeHalf(w http.ResponseWriter, half string) {
	w.Header().Set("Content-Type", "text/html")
	for i := range resources {
		fmt.Fprintf(w, "<script src=/script/%s-%d></script>\n", half, i)
	}
}

// await returns the next requests for the page and its resources, so many of them.
func (s *http2Servers) await(t *testing.T, count int) (got []http2Request) {
	t.Helper()
	timeout := time.After(patience)
	for len(got) < count {
		select {
		case r := <-s.requests:
			if r.path != "/favicon.ico" {
				got = append(got, r)
			}
		case <-timeout:
			t.Fatalf("after %v, the browser has made only the requests %v", patience, got)
		}
	}
	return got
}

// TestHTTP2Chromium lets a browser load pages through services without a flow table, by HTTP/2.
// While the browser loads a page, one server is added and another one is removed. All requests for
// a page come by one connection.
func TestHTTP2Chromium(t *testing.T) {
	t.Parallel()
	testhost.NeedCommand(t, "chromium", "chromium")
	// insert6 and encap4 have the family and the encapsulation of encap6.
	services := slices.DeleteFunc(statelessServices(4), func(s lab.Service) bool {
		return s.Encapsulation == desired.SRv6Encap && s.VIP.Is6()
	})
	topology := hunting(services...)
	topology.Servers, topology.Applications = 5, []lab.Application{lab.Nginx}
	l := up(t, refusing(topology))
	servers := startHTTP2(t, l)
	all := nodes(l, lab.RoleServer)
	for _, s := range l.Topology.Services {
		keepOnly(t, l, all[:4]...)
		b := startChromium(t, l, s, servers.keys)
		got := servers.await(t, 1+resources)
		keepOnly(t, l, withoutOne(all, got[0].server)...)
		servers.changed <- struct{}{}
		got = append(got, servers.await(t, resources)...)
		requirePage(t, s, b.wait(t))
		for _, r := range got {
			if r.protocol != "HTTP/2.0" || r.server != got[0].server || r.client != got[0].client {
				t.Errorf("%s: the requests are %v, want HTTP/2.0 and one connection", s.Name, got)
				break
			}
		}
	}
	for _, name := range nodes(l, lab.RoleBalancer) {
		t.Logf("%s: %d packets were of columns that have had another server", name,
			packetCounts(t, l.Node(name))["forward_recover"])
	}
	requireNoDrops(t, l)
}

// keepOnly gives all services these servers, and waits until all of them get new flows.
func keepOnly(t *testing.T, l *lab.Lab, servers ...string) {
	t.Helper()
	reconfigure(t, l, func(cfg *desired.Balancer) { keepServers(cfg, servers...) })
	awaitServers(t, l)
}

// withoutOne returns all servers except for one. It never leaves out the server kept.
func withoutOne(all []string, kept string) []string {
	i := slices.IndexFunc(all, func(name string) bool { return name != kept })
	return slices.Delete(slices.Clone(all), i, i+1)
}

// requirePage requires that all resources have written their names into the page, in their order.
func requirePage(t *testing.T, s lab.Service, page string) {
	t.Helper()
	rest := page
	for _, half := range []string{"before", "after"} {
		for i := range resources {
			_, after, ok := strings.Cut(rest, fmt.Sprintf("<p>%s-%d</p>", half, i))
			if !ok {
				t.Errorf("%s: resource %s-%d is missing in the page %s", s.Name, half, i, page)
				return
			}
			rest = after
		}
	}
}

// TestQUICChromium lets a browser fetch a page through the balancers, by HTTP/3.
func TestQUICChromium(t *testing.T) {
	t.Parallel()
	testhost.NeedCommand(t, "chromium", "chromium")
	l := up(t, quicLab(3))
	servers := startQUICServers(t, l)
	reconfigure(t, l, byID)
	s := service(t, l, "echo4-gre")
	b := startChromium(t, l, s, servers.keys,
		fmt.Sprintf("--origin-to-force-quic-on=%s:%d", browserHost, s.Port))
	if page := b.wait(t); !strings.Contains(page, "HTTP/3.0, client ") {
		t.Errorf("the page is %q", page)
	}
}
