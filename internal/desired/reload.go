// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/segue-lb/segue/internal/fieldpath"
)

// SeedField is the path of the only field whose value in the file is secret. No message shows the
// value. This includes an invalid seed: an operator who corrects it keeps most of its digits.
const SeedField = "node.seed"

// Setting is a field whose change needs a restart, with its value as text.
type Setting struct {
	Field string `json:"field"` // its path, such as node.interface
	Value string `json:"value"`
}

// Fixed returns the fields whose change needs a restart, in the order of
// docs/reference/configuration.md.
func (b *Balancer) Fixed() []Setting {
	speaker := BGP{}
	if b.BGP != nil {
		speaker = *b.BGP
	}
	lease := time.Duration(0)
	if b.L2 != nil {
		lease = b.L2.Lease
	}
	var to Switch
	if b.Node.Switch != nil {
		to = *b.Node.Switch
	}
	return slices.Concat([]Setting{
		setting("node.instance", b.Node.Instance),
		setting("node.interface", b.Node.Interface),
		setting("node.inside", b.Node.Inside),
		setting("node.internal", b.Node.IsInternal()),
		setting("node.xdp-mode", b.Node.XDPMode),
	}, b.Node.Underlay.fixed(), []Setting{
		setting(SeedField, b.Node.Seed),
		setting("node.state", b.Node.State),
		setting("node.limits.flows", b.Node.Limits.Flows),
		setting("node.limits.hints", b.Node.Limits.Hints),
		setting("node.limits.servers", b.Node.Limits.Servers),
		setting("node.switch.address", to.Address),
	}, to.TLSFiles.fixed("node.switch"), []Setting{
		setting("node.switch.device", to.Device),
		setting("node.switch.election-id", to.ElectionID),
		setting("node.switch.network-port", to.NetworkPort),
		setting("node.switch.host-port", to.HostPort),
		setting("api.group", b.API.Group),
		setting("metrics.listen", b.Metrics.Listen),
		setting("bgp.asn", speaker.ASN),
		setting("bgp.router-id", speaker.RouterID),
		setting("bgp.listen", speaker.Listen),
		setting("bgp.restart-time", speaker.RestartTime),
		setting("l2.lease", lease),
	}, b.Store.fixed())
}

// Fixed returns the fields whose change needs a restart.
func (a *Agent) Fixed() []Setting {
	return slices.Concat([]Setting{
		setting("node.instance", a.Node.Instance),
		setting("node.interface", a.Node.Interface),
		setting("node.internal", a.Node.IsInternal()),
		setting("node.xdp-mode", a.Node.XDPMode),
	}, a.Node.Underlay.fixed(), []Setting{
		setting("node.state", a.Node.State),
		setting("api.group", a.API.Group),
		setting("metrics.listen", a.Metrics.Listen),
		setting("poll.listen", a.Poll.Listen),
	})
}

func setting(field string, value any) Setting { return Setting{field, fmt.Sprint(value)} }

// ReloadableFrom returns an error if a balancer that runs with old cannot reload b. The error is of
// type fieldpath.Errors. It names each changed field that needs a restart, with the new and the old
// value, unless they are secret.
func (b *Balancer) ReloadableFrom(old *Balancer) error {
	return CheckFixed(b.Fixed(), old.Fixed())
}

// ReloadableFrom is Balancer.ReloadableFrom for an agent.
func (a *Agent) ReloadableFrom(old *Agent) error {
	return CheckFixed(a.Fixed(), old.Fixed())
}

// CheckFixed compares the fixed settings of a configuration with those of a running process. It
// returns fieldpath.Errors, one for each setting that differs. It ignores a setting that the
// process does not have: the process runs another build.
func CheckFixed(wanted, running []Setting) error {
	var fixed fieldpath.Errors
	for _, w := range wanted {
		i := slices.IndexFunc(running, func(r Setting) bool { return r.Field == w.Field })
		if i < 0 || running[i].Value == w.Value {
			continue
		}
		remedy := "needs a restart"
		if strings.HasPrefix(w.Field, "node.limits.") {
			remedy = "needs a stop, `segue lb detach` (which forgets all flows), and a start"
		}
		problem := &fieldpath.Error{
			Path:    w.Field,
			Value:   w.Value,
			Problem: fmt.Sprintf("a change from %q %s", running[i].Value, remedy),
		}
		if w.Field == SeedField {
			problem.Value, problem.Problem = "", "a change "+remedy
		}
		fixed = append(fixed, problem)
	}
	return fixed.OrNil()
}
