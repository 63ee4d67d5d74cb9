# ruff: noqa
from tests.further.experts import *
from tests.further import experts as X
from torch.utils.checkpoint import checkpoint

def loop(experts, x, index, weights, out):
    for n, e in enumerate(experts):
        row, slot = torch.where(index == n)
        if len(row):
            out = out.index_add(0, row, e(x[row]) * weights[row, slot, None])
    return out

class Base(nn.Module):
    def __init__(s, experts=4, k=2):
        super().__init__(); s.router=Router(experts,k); s.experts=nn.ModuleList(Expert() for _ in range(experts))
    def forward(s, h):
        x=h.flatten(0,1); w,i=s.router(x); return s.go(x,w,i).view_as(h)
    def go(s,x,w,i): return loop(s.experts,x,i,w,torch.zeros_like(x))

class NormAfter(Base):
    def __init__(s, e=4,k=2): super().__init__(e,k); s.norm=nn.LayerNorm(WIDTH); s.out=nn.Linear(WIDTH,WIDTH)
    def go(s,x,w,i): return s.out(s.norm(super().go(x,w,i)))
class BNAfter(Base):
    def __init__(s, e=4,k=2): super().__init__(e,k); s.norm=nn.BatchNorm1d(WIDTH); s.norm.eval()
    def train(s,m=True): super().train(m); s.norm.eval(); return s
    def go(s,x,w,i): return s.norm(super().go(x,w,i))
class Chain(Base):
    def go(s,x,w,i):
        h=x
        for n,e in enumerate(s.experts):
            row,slot=torch.where(i==n)
            if len(row): h=h.index_add(0,row,e(h[row])*w[row,slot,None])
        return h
class Keyword(Base):
    def go(s,x,w,i):
        out=torch.zeros_like(x)
        for n,e in enumerate(s.experts):
            row,slot=torch.where(i==n)
            out=out.index_add(0,row,e(x=x[row])*w[row,slot,None])
        return out
class TupleExpert(Expert):
    def forward(s,x): y=super().forward(x); return y, y.square().mean()
class TupleL(Base):
    def __init__(s,e=4,k=2):
        super().__init__(e,k); s.experts=nn.ModuleList(TupleExpert() for _ in range(e))
    def go(s,x,w,i):
        out=torch.zeros_like(x)
        for n,e in enumerate(s.experts):
            row,slot=torch.where(i==n)
            if len(row): out=out.index_add(0,row,e(x[row])[0]*w[row,slot,None])
        return out
class Wide(Base):
    def __init__(s,e=4,k=2):
        super().__init__(e,k); s.experts=nn.ModuleList(nn.Sequential(nn.Linear(WIDTH,2*WIDTH)) for _ in range(e)); s.out=nn.Linear(2*WIDTH,WIDTH)
    def go(s,x,w,i): return s.out(loop(s.experts,x,i,w,x.new_zeros(len(x),2*WIDTH)))
class Attr(Base):
    def __init__(s,e=4,k=2): super().__init__(e,k); s.usage=torch.zeros(e); s.stats={"n":[0]}; s.seen=set()
    def go(s,x,w,i):
        s.usage += 1; s.stats["n"][0]+=1
        return super().go(x*(1+0.01*s.usage.sum()/1000)*(1+.01*s.stats["n"][0]),w,i)
class BufScale(Base):
    def __init__(s,e=4,k=2): super().__init__(e,k); s.register_buffer("scale",torch.linspace(.5,1.5,WIDTH)); s.register_buffer("count",torch.zeros(()))
    def go(s,x,w,i):
        s.count+=1
        y=x*s.scale
        return super().go(y.exp().sin(),w,i)
class StackAll(Base):
    def go(s,x,w,i):
        made=torch.stack([e(x) for e in s.experts],1)
        return (made.gather(1,i[...,None].expand(*i.shape,WIDTH))*w[...,None]).sum(1)
class Break(Base):
    def go(s,x,w,i):
        out=torch.zeros_like(x)
        for n,e in enumerate(s.experts):
            row,slot=torch.where(i==n)
            out=out.index_add(0,row,e(x[row])*w[row,slot,None])
            if (i<=n).all() : break
        return out
class EList(nn.ModuleList):
    def forward(s,x,i,w): return loop(s,x,i,w,torch.zeros_like(x))
class ListFwd(Base):
    def __init__(s,e=4,k=2): super().__init__(e,k); s.experts=EList(Expert() for _ in range(e))
    def go(s,x,w,i): return s.experts(x,i,w)
class EDict(nn.ModuleDict):
    def forward(s,x,mask,probs):
        out=torch.zeros_like(x)
        for n,e in enumerate(s.values()):
            m=mask[:,n].bool()
            if m.any():
                out[m]=out[m]+probs[m,n][:,None]*e(x[m])
        return out
class Nllb(Base):
    def __init__(s,e=4,k=2): super().__init__(e,k); s.experts=EDict({f"expert_{n}":Expert() for n in range(e)})
    def go(s,x,w,i):
        p=torch.zeros(len(x),4,dtype=x.dtype).scatter(1,i,w)
        return s.experts(x,(p>0).long(),p)
class Parts(Base):
    """uses expert's own children"""
    def go(s,x,w,i):
        made=torch.stack([e.down(F.gelu(e.up(x))) for e in s.experts],1)
        return (made.gather(1,i[...,None].expand(*i.shape,WIDTH))*w[...,None]).sum(1)
class Weights(Base):
    def go(s,x,w,i):
        up=torch.stack([e.up.weight for e in s.experts]); down=torch.stack([e.down.weight for e in s.experts])
        made=torch.einsum("ni,eoi,epo->nep",x,up,down)
        return (made.gather(1,i[...,None].expand(*i.shape,WIDTH))*w[...,None]).sum(1)
class CkptExpert(Base):
    re=False
    def go(s,x,w,i):
        out=torch.zeros_like(x)
        for n,e in enumerate(s.experts):
            row,slot=torch.where(i==n)
            if len(row): out=out.index_add(0,row,checkpoint(e,x[row],use_reentrant=s.re)*w[row,slot,None])
        return out
class CkptExpertRe(CkptExpert): re=True
class Ckpt(Base):
    def forward(s,h): return checkpoint(super().forward,h,use_reentrant=False)
class CkptOut(nn.Module):
    re=False; inner=Base
    def __init__(s,e=4,k=2): super().__init__(); s.moe=s.inner(e,k)
    def forward(s,h): return checkpoint(s.moe,h,use_reentrant=s.re)
class CkptOutRe(CkptOut): re=True
class CkptBank(CkptOut): inner=Banked
class CkptBankRe(CkptOutRe): inner=Banked
class Two(nn.Module):
    def __init__(s,e=4,k=2): super().__init__(); s.a=Base(e,k); s.b=Banked(e,k)
    def forward(s,h): return s.a(h)+s.b(h)
class Container(nn.Module):
    def __init__(s,e=4,k=2):
        super().__init__(); s.moe=nn.ModuleDict({"router":Router(e,k),"experts":nn.ModuleList(Expert() for _ in range(e))})
    def forward(s,h):
        x=h.flatten(0,1); w,i=s.moe["router"](x); return loop(s.moe["experts"],x,i,w,torch.zeros_like(x)).view_as(h)
class Method(nn.Module):
    def __init__(s,e=4,k=2): super().__init__(); s.moe=Base(e,k)
    def forward(s,h):
        x=h.flatten(0,1); w,i=s.moe.router(x); return s.moe.go(x,w,i).view_as(h)
class Frozen(Base):
    def __init__(s,e=4,k=2):
        super().__init__(e,k); s.experts[1].requires_grad_(False); s.experts[3].up.requires_grad_(False)
class FrozenAll(Base):
    def __init__(s,e=4,k=2): super().__init__(e,k); s.experts.requires_grad_(False)
class FrozenRouter(Base):
    def __init__(s,e=4,k=2): super().__init__(e,k); s.router.requires_grad_(False)
class FrozenBank(Banked):
    def __init__(s,e=4,k=2): super().__init__(e,k); s.experts.up.requires_grad_(False); s.router.requires_grad_(False)
class FrozenBankAll(Banked):
    def __init__(s,e=4,k=2): super().__init__(e,k); s.experts.requires_grad_(False)
class Lora(nn.Module):
    def __init__(s):
        super().__init__(); s.base=Expert(); s.base.requires_grad_(False); s.a=nn.Linear(WIDTH,2,bias=False); s.b=nn.Linear(2,WIDTH,bias=False)
    def forward(s,x): return s.base(x)+s.b(s.a(x))
class LoraL(Base):
    def __init__(s,e=4,k=2): super().__init__(e,k); s.experts=nn.ModuleList(Lora() for _ in range(e))
class One(Base):
    """only ever expert 2"""
    def go(s,x,w,i): return super().go(x,w[:,:1],i[:,:1]*0+2)
class Dup(Base):
    def go(s,x,w,i): return super().go(x,w,i[:,:1].expand(-1,2))
# stacked
class Kw(Banked):
    def forward(s,x): w,i=s.router(x); return s.experts(which=i,tokens=x,how_much=w)
class Int32(Banked):
    def forward(s,x): w,i=s.router(x); return s.experts(x,i.int(),w)
class K1(Banked):
    def forward(s,x):
        x=x.flatten(0,1); w,i=s.router(x); return s.experts(x,i[:,:1],w[:,:1]).view(-1,16,WIDTH) if 0 else s.experts(x,i[:,:1],w[:,:1])
class K1(nn.Module):
    def __init__(s,e=4,k=1): super().__init__(); s.router=Router(e,1); s.experts=Bank(e)
    def forward(s,x): w,i=s.router(x); return s.experts(x,i,w)
class TopBank(Bank):
    def forward(s,tokens,which,how_much): return super().forward(tokens,which[...,None],how_much[...,None])
class Squeezed(Banked):
    def __init__(s,e=4,k=1): super().__init__(e,1,TopBank)
    def forward(s,x): w,i=s.router(x); return s.experts(x,i[...,0],w[...,0])
class SlotBank(Bank):
    def forward(s,tokens,which,how_much):
        return torch.stack([super(SlotBank,s).forward(tokens,which[...,n:n+1],how_much[...,n:n+1]) for n in range(which.shape[-1])],-2)
class Slots(Banked):
    def __init__(s,e=4,k=2): super().__init__(e,k,SlotBank)
    def forward(s,x): w,i=s.router(x); return s.experts(x,i,w).sum(-2)
class TupBank(Bank):
    def forward(s,tokens,which,how_much): y=super().forward(tokens,which,how_much); return y,y.square().mean()
class Tup(Banked):
    def __init__(s,e=4,k=2): super().__init__(e,k,TupBank)
    def forward(s,x): w,i=s.router(x); return s.experts(x,i,w)[0]
class MaskBank(Bank):
    def forward(s,tokens,mask,how_much):
        out=0
        for n in range(len(s.up)):
            out=out+mask[...,n,None]*how_much[...,n,None]*(s.norm(F.silu(tokens@s.up[n]+s.bias[n])@s.down[n])*s.gain[n])
        return out
class Mask(Banked):
    def __init__(s,e=4,k=2): super().__init__(e,k,MaskBank)
    def forward(s,x):
        w,i=s.router(x); p=torch.zeros(*x.shape[:-1],4,dtype=x.dtype).scatter(-1,i,w)
        return s.experts(x,(p>0),p)
class MaskLong(Mask):
    def forward(s,x):
        w,i=s.router(x); p=torch.zeros(*x.shape[:-1],4,dtype=x.dtype).scatter(-1,i,w)
        return s.experts(x,(p>0).long(),p)
class SentBank(Bank):
    pass
class Sent(Banked):
    v=-1
    def forward(s,x):
        w,i=s.router(x); i=i.masked_fill(w<0.45,s.v); return s.experts(x,i,w)
class SentE(Sent): v=4
class DupB(Banked):
    def forward(s,x): w,i=s.router(x); return s.experts(x,i[...,:1].expand_as(i),w)
class CapBank(Bank):
    def forward(s,tokens,which,how_much):
        t=tokens.reshape(-1,tokens.shape[-1]); wh=which.reshape(len(t),-1); hm=how_much.reshape(len(t),-1)
        cap=int(1.5*wh.numel()/len(s.up))+1; out=torch.zeros_like(t)
        for n in range(len(s.up)):
            row,slot=(wh==n).nonzero().unbind(-1); row,slot=row[:cap],slot[:cap]
            out=out.index_add(0,row,(F.silu(t[row]@s.up[n]+s.bias[n])@s.down[n])*hm[row,slot,None])
        return out.view_as(tokens)
class CumBank(Bank):
    def forward(s,t,w,h): return super().forward(t,w,h)*torch.sigmoid(t.cumsum(-2)[...,:1])
class Outer(nn.Module):
    def __init__(s,shared=False):
        super().__init__(); s.embed,s.head=nn.Embedding(VOCABULARY,WIDTH),nn.Linear(WIDTH,VOCABULARY)
class TiedLists(Mixture):
    def __init__(s,optimizer=adamw,**k):
        super().__init__(Base,optimizer); b=s.network.blocks; b[1].mixture.experts=b[0].mixture.experts
class TiedWhole(Mixture):
    def __init__(s,optimizer=adamw,**k):
        super().__init__(Base,optimizer); b=s.network.blocks; b[1].mixture=b[0].mixture
class TiedBanks(Mixture):
    def __init__(s,optimizer=adamw,**k):
        super().__init__(Banked,optimizer); b=s.network.blocks; b[1].mixture.experts=b[0].mixture.experts
class OnModule(LanguageModel):
    def __init__(s,optimizer=adamw):
        nn.Module.__init__(s) if 0 else super().__init__(nn.Embedding(VOCABULARY,WIDTH),optimizer)
        s.router=Router(4,2); s.experts=nn.ModuleList(Expert() for _ in range(4)); s.head=nn.Linear(WIDTH,VOCABULARY)
    def loss(s,b):
        x=s.network(b["input_ids"]).flatten(0,1); w,i=s.router(x); x=x+loop(s.experts,x,i,w,torch.zeros_like(x))
        return F.cross_entropy(s.head(x),b["labels"].flatten(),ignore_index=IGNORED)
class BankOnModule(OnModule):
    def __init__(s,optimizer=adamw): super().__init__(optimizer); s.experts=Bank(4)
    def loss(s,b):
        x=s.network(b["input_ids"]).flatten(0,1); w,i=s.router(x); x=x+s.experts(x,i,w)
        return F.cross_entropy(s.head(x),b["labels"].flatten(),ignore_index=IGNORED)
MODELS={n:partial(Mixture,c) for n,c in list(globals().items()) if isinstance(c,type) and issubclass(c,nn.Module) and not issubclass(c,LanguageModel) and c.__module__==__name__ and "Bank" not in n[1:] }
MODELS={n:m for n,m in MODELS.items() if n not in ("EList","EDict","Lora","TupleExpert","Outer","Base")}
for n in ("CkptBank","CkptBankRe","FrozenBank","FrozenBankAll"): MODELS[n]=partial(Mixture,globals()[n])
MODELS["CapB"]=partial(Mixture,Banked,bank=CapBank)
for c in (TiedLists,TiedWhole,TiedBanks,OnModule,BankOnModule): MODELS[c.__name__]=c
