// SPDX-License-Identifier: Apache-2.0

package config

import (
	"reflect"
	"strings"

	"go.yaml.in/yaml/v4"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
)

// decoded has the services that were decoded from a document. An override changes few services, and
// merge keeps the nodes of all others. So services and servers with the same nodes need not be
// decoded again. To decode them again would take most of the time of a change.
type decoded struct {
	services map[string]decodedService // by name
}

type decodedService struct {
	node    *yaml.Node
	service *desired.Service
}

// decodedOf returns the services of a document from which a balancer was made without an error.
func decodedOf(root *yaml.Node, b *desired.Balancer) *decoded {
	d := &decoded{map[string]decodedService{}}
	for i, node := range servicesOf(root) {
		d.services[b.Services[i].Name] = decodedService{node, &b.Services[i]}
	}
	return d
}

// reuse sets a service or server to the one that was decoded from the same node before. It returns
// false if there is none. A reused value has all defaults, and shares memory with the earlier one.
// For a service whose node has changed, reuse puts the servers that can be reused into d.servers.
func (d *document) reuse(path string, node *yaml.Node, into reflect.Value) bool {
	switch into := into.Addr().Interface().(type) {
	case *desired.Service:
		d.servers = nil
		before, ok := d.before.services[nameOf(node)]
		switch {
		case !ok:
			return false
		case before.node != node:
			d.servers = before.serversFor(resolved(node))
			return false
		}
		*into = *before.service
	case *desired.Server:
		before, ok := d.servers[node]
		if !ok {
			return false
		}
		*into = *before
	default:
		return false
	}
	d.reused[path] = true
	d.fields[path] = place{line: node.Line}
	return true
}

// serversFor returns the decoded servers of a service, by the nodes of the servers. now is the
// changed node of the service. serversFor returns nil if a field other than servers has changed,
// because the defaults of a server can depend on that field.
func (s *decodedService) serversFor(now *yaml.Node) map[*yaml.Node]*desired.Server {
	before := resolved(s.node)
	if len(before.Content) != len(now.Content) {
		return nil
	}
	for i := 0; i < len(now.Content); i += 2 {
		isSame := now.Content[i] == before.Content[i] && now.Content[i+1] == before.Content[i+1]
		if !isSame && (now.Content[i].Value != "servers" || before.Content[i].Value != "servers") {
			return nil
		}
	}
	servers := map[*yaml.Node]*desired.Server{}
	for i, node := range elements(child(before, "servers")) {
		servers[node] = &s.service.Servers[i]
	}
	return servers
}

// given tells whether a field needs no default: the document has a value for it, or it belongs to a
// service or server that was reused.
func (d *document) given(path string) bool {
	if d.has(path) {
		return true
	}
	end := strings.LastIndexByte(path, ']') // here the path of the service or server ends
	return end >= 0 && d.reused[path[:end+1]]
}

// isNew tells whether a service was decoded and not reused.
func (d *document) isNew(service int) bool { return !d.reused[fieldpath.Item("services", service)] }

// completeServices sets the defaults of the services that were not reused.
func (d *document) completeServices(b *desired.Balancer) {
	for i := range b.Services {
		if d.isNew(i) {
			b.Services[i].Revision = new(desired.Revision)
			b.SetServiceDefaults(i, d.given)
		}
	}
}
